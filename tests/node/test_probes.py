"""Probes: background reads of a device that nobody asked for, and when there are none."""

from __future__ import annotations

import threading

import pytest

from device_rig import BAD, BLOCK, NAMESPACE, chain
from headstart.node.devices import Devices
from headstart.testing import Fault

SOON = 20.0


def test_a_device_of_which_nothing_is_known_is_probed_three_times_and_then_left_alone(rig):
    rig.put("abcd", "xy")
    assert [rig.tick() for _ in range(4)] == [1, 1, 1, 0]
    assert sum(rig.tick(after_s=100.0) for _ in range(20)) == 0, "it is healthy, nobody asked"
    assert rig.state.num_observed == 3
    assert rig.device.costs(BLOCK).read_s(BLOCK) < 0.002, "better than the guess of before"


def test_a_tier_that_holds_blocks_at_start_is_probed_before_anybody_asks(make_rig):
    before = make_rig()
    before.put("abcd")
    before.close()
    rig = make_rig(is_known=False)
    assert rig.tick() == 0, "of no namespace that anybody has opened"
    rig.store.open_namespace(NAMESPACE)
    assert [rig.tick(after_s=3.0) for _ in range(4)] == [1, 1, 1, 0]


def test_an_empty_tier_is_not_probed(rig):
    assert sum(rig.tick(after_s=5.0) for _ in range(5)) == 0
    assert rig.counted.num_begun == 0


def test_a_device_that_somebody_wanted_is_probed_for_a_while(rig):
    rig.teach()
    rig.device.want()
    assert rig.tick() == 1
    assert rig.tick(after_s=0.1) == 0, "with rests in between"
    assert rig.tick(after_s=10.0) == 1
    assert rig.tick(after_s=60.0) == 0
    rig.device.want()
    assert rig.tick() == 1


def test_no_probe_gets_in_the_way_of_a_request(rig, soon):
    rig.teach()
    rig.device.want()
    rig.slow.stall()
    batch = rig.counted.begin_read(chain("a"), [memoryview(bytearray(BLOCK))])
    ticket = rig.transfer.read(batch, nbytes=BLOCK)
    rig.device.tick()
    assert rig.state.num_probes == 0
    rig.slow.resume()
    assert ticket.wait(SOON)
    assert rig.tick() == 1


def test_probes_that_fail_rest_too(rig):
    rig.put("abcd")
    rig.io(BAD)
    assert sum(rig.tick(after_s=0.1) for _ in range(50)) <= 10, "in 5 s"


def test_a_probe_that_cannot_be_begun_is_not_the_last(rig, monkeypatch):
    rig.put("abcd")

    def refused(chain, targets):
        raise OSError("too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(rig.counted, "begin_probe", refused)
        with pytest.raises(OSError, match="too many"):
            rig.device.tick()
    assert not rig.device._is_probing
    assert rig.tick(after_s=5.0) == 1


def test_probes_read_as_many_blocks_as_requests_have_in_flight_once_something_is_known(make_rig):
    """What a device gives to a single one, out of a burst that it allows, is not what they get."""
    rig = make_rig(num_threads=8)
    rig.put("abcd", "xy")
    assert rig.device.costs(BLOCK).lag_nbytes == 3 * BLOCK
    before = rig.counted.num_begun
    begun = []
    for _ in range(3):
        assert rig.tick(after_s=3.0) == 1
        begun.append(rig.counted.num_begun - before)
    assert begun == [1, 4, 7]
    assert [nbytes for nbytes, _ in rig.device._model._recent] == [BLOCK, 3 * BLOCK, 3 * BLOCK]
    assert rig.device.costs(BLOCK).ahead_nbytes == 0


def test_blocks_of_a_probe_that_cannot_be_begun_are_given_back(make_rig, monkeypatch):
    rig = make_rig(num_threads=8)
    rig.put("abcd")
    assert rig.tick() == 1
    begin, chains = rig.counted.begin_probe, []

    def refused(chain, targets):
        chains.append(chain)
        if len(chains) == 2:
            raise OSError("too many open files")
        return begin(chain, targets)

    with monkeypatch.context() as patched:
        patched.setattr(rig.counted, "begin_probe", refused)
        with pytest.raises(OSError, match="too many"):
            rig.device.tick()
    rig.file.index.check_invariants()
    assert rig.file.discard(chain("a").keys) == 4, "nothing is pinned"
    assert not rig.device._is_probing


def test_what_a_probe_reads_is_ahead_of_a_request(rig):
    rig.put("abcd")
    rig.slow.stall()
    rig.device.tick()
    assert rig.device.costs(BLOCK).ahead_nbytes == BLOCK
    rig.slow.resume()
    rig.settle()
    assert rig.device.costs(BLOCK).ahead_nbytes == 0


def test_the_time_to_choose_a_block_is_not_the_devices(rig, monkeypatch):
    """It grows with the number of blocks that a tier holds."""
    rig.put("abcd")
    sample = rig.counted.sample

    def choose():
        rig.clock.skip(0.1)
        return sample()

    monkeypatch.setattr(rig.counted, "sample", choose)
    assert [rig.tick() for _ in range(3)] == [1, 1, 1]
    assert rig.device.costs(BLOCK).read_s(BLOCK) < 0.01


def test_a_probe_is_nobodys_hit(rig):
    rig.teach()
    before = rig.file.stats().num_hits
    rig.device.want()
    assert rig.tick() == 1
    assert rig.file.stats().num_hits == before


def test_a_thread_looks_after_devices_until_they_are_closed(rig, soon):
    rig.put("abcd")
    threads = threading.active_count()
    devices = Devices(rig.store.lower, tick_s=0.002, clock=rig.clock)
    soon(lambda: devices.states()["file"].num_observed == 3)
    devices.close()
    devices.close()
    assert threading.active_count() == threads


@pytest.mark.parametrize("attribute", ["queued_nbytes", "reading_nbytes"])
def test_a_probe_beside_other_work_breaks_no_model(rig, monkeypatch, attribute):
    rig.teach()
    rig.io(Fault(latency_s=0.5))
    rig.device.want()
    is_due = rig.device._is_due
    monkeypatch.setattr(rig.device, "_is_due", lambda now: is_due(now) or True)
    monkeypatch.setattr(type(rig.transfer), attribute, property(lambda transfer: 1))
    assert rig.tick() == 1
    assert not rig.device.is_open


def test_a_probe_that_breaks_the_model_opens_the_breaker_and_three_that_agree_close_it(rig):
    rig.teach()
    rig.io(Fault(latency_s=0.5))
    rig.device.want()
    assert rig.tick() == 1
    assert (rig.device.is_open, rig.state.breaker) == (True, "slow")
    for _ in range(3):
        assert rig.device.is_open
        assert rig.tick(after_s=6.0) == 1
    assert not rig.device.is_open
    assert rig.device.costs(BLOCK).read_s(BLOCK) == pytest.approx(0.5, rel=0.1)
