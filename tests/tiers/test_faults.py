"""`FaultyTier` and `CountingTier` do what they say to any tier."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from headstart.testing import CountingTier, DictHarness, Fault, FaultyTier, TierRig
from headstart.testing.bounds import run_bounded
from headstart.tiers.faults import STALL_MAX_S, Phase, by_time
from headstart.types import Outcome

DONE, FAILED, MISS = Outcome.DONE, Outcome.FAILED, Outcome.MISS


class WrappedHarness(DictHarness):
    def __init__(self, wrap):
        super().__init__()
        self._wrap = wrap

    def make(self):
        return self._wrap(super().make())


@pytest.fixture
def slept():
    return []


@pytest.fixture
def rig(slept):
    with TierRig(WrappedHarness(partial(FaultyTier, sleep=slept.append))) as rig:
        yield rig


def test_a_failed_io_fails_its_block(rig):
    rig.store(rig.chain("abc"))
    rig.tier.schedule = lambda number: Fault(fails=number == 4)
    assert rig.read(rig.chain("abc")) == [DONE, FAILED, DONE]
    assert rig.tier.stats().num_failed == 1
    assert rig.read(rig.chain("abcd")) == [DONE, DONE, DONE, MISS]


def test_a_failed_write_is_not_stored(rig):
    rig.tier.schedule = lambda number: Fault(fails=number == 1)
    outcomes = rig.write(rig.chain("abc"))
    assert outcomes[:2] == [DONE, FAILED]
    assert outcomes[2] is not DONE
    assert rig.tier.lookup(rig.chain("abc").keys) == 1


def test_latency_goes_through_the_given_sleep(rig, slept):
    rig.tier.schedule = lambda number: Fault(latency_s=0.25 * (number % 2))
    rig.store(rig.chain("abcd"))
    assert slept == [0.25, 0.25]


def test_a_stalled_io_waits_for_resume(rig):
    rig.store(rig.chain("a"))
    rig.tier.stall()
    outcomes = []

    def read():
        outcomes.extend(rig.read(rig.chain("a")))

    def resume():
        while rig.tier.num_stalled == 0:
            threading.Event().wait(0.001)
        assert outcomes == []
        rig.tier.resume()

    run_bounded([read, resume], timeout_s=10)
    assert outcomes == [DONE]
    assert rig.tier.num_stalled == 0


def test_counting_counts():
    with TierRig(WrappedHarness(CountingTier)) as rig:
        rig.store(rig.chain("abc"))
        opened = rig.begin_read(rig.chain("ab"))
        tier = rig.tier
        assert (tier.num_begun, tier.num_finished, tier.num_runs) == (2, 1, 3)
        opened.end()
        tier.lookup(rig.chain("ab").keys)
        assert (tier.num_finished, tier.num_runs, tier.num_lookups) == (2, 5, 1)
        assert tier.num_running_max == 1


def test_phases_come_and_go_by_time():
    now = [100.0]
    phases = [
        Phase(latency_s=0.5),
        Phase(start_s=10.0, stop_s=20.0, stalls=True),
        Phase(start_s=15.0, stop_s=16.0, error_rate=1.0, bytes_per_s=1e6),
    ]
    schedule = by_time(phases, clock=lambda: now[0])
    seen = {}
    for at in (0.0, 9.9, 12.0, 15.5, 17.0, 20.0):
        now[0] = 100.0 + at
        seen[at] = schedule(0)
    assert seen[0.0] == seen[9.9] == seen[20.0] == Fault(latency_s=0.5)
    assert seen[12.0].latency_s == pytest.approx(8.0)
    assert seen[17.0].latency_s == pytest.approx(3.0)
    assert seen[15.5] == Fault(fails=True, bytes_per_s=1e6)
    assert by_time([Phase(start_s=5.0)])(0) == Fault()
    forever = by_time([Phase(stalls=True)])(0)
    assert forever.latency_s == STALL_MAX_S


def test_bandwidth_is_of_all_io_together(rig, slept):
    rig.tier._clock = lambda: 50.0
    rig.tier.schedule = lambda number: Fault(bytes_per_s=1e6)
    assert not rig.tier.suffer(500_000)
    assert not rig.tier.suffer(250_000)
    assert slept == [0.5, 0.75]
