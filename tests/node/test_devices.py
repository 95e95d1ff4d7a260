"""Devices: what reads teach, what opens a breaker and what closes it.

Time passes only where an I/O of the tier takes some, or where a test says so.
"""

from __future__ import annotations

import threading

import pytest

from device_rig import BAD, BLOCK, FAST, NAMESPACE, SLOW, chain
from headstart.testing import Fault

SOON = 20.0


def stalled(rig, wait_for):
    """Read a path of a device that stands still, until its breaker opens; the blocks it gets."""
    rig.teach()
    rig.memory.discard_namespace(NAMESPACE.id)
    got = []
    may_read = rig.devices.may_read
    rig.slow.stall()

    def load():
        with rig.store.load(
            chain("abcd"), go_on=lambda ready, tier: may_read(tier), may_read=may_read
        ) as lease:
            got.append(lease.ready_blocks)

    thread = threading.Thread(target=load)
    thread.start()
    wait_for(lambda: rig.slow.num_stalled)
    rig.device.tick()
    assert not rig.device.is_open, "it has only begun"
    rig.clock.skip(3.0)
    rig.device.tick()
    thread.join(SOON)
    assert not thread.is_alive()
    return got[0]


# ----------------------------------------------------------------------------------- what is learnt


def test_a_read_teaches_what_reads_take(rig):
    rig.teach(SLOW)
    expected = rig.device.costs(BLOCK).read_s(4 * BLOCK)
    assert 0.199 < expected < 0.3
    assert rig.state.num_observed == 4
    rig.io(FAST)
    for _ in range(12):
        rig.read("abcd")
    assert 0.0039 < rig.device.costs(BLOCK).read_s(4 * BLOCK) < 0.008, "it has become fast"


def test_a_device_that_became_slower_is_believed_at_once(rig):
    rig.teach()
    before = rig.device.costs(BLOCK).read_s(4 * BLOCK)
    rig.io(Fault(latency_s=0.008))
    rig.read("abcd")
    assert rig.device.costs(BLOCK).read_s(4 * BLOCK) > 6 * before


def test_a_slow_device_has_less_in_flight(make_rig):
    """Else the first block of a prefix came as late as its last."""
    rig = make_rig(num_threads=40)
    rig.transfer.inflight_nbytes = rig.transfer.wanted_nbytes = 32 * BLOCK
    assert rig.transfer.num_at_once(BLOCK) == 34
    rig.teach(SLOW)
    assert 3 < rig.transfer.num_at_once(BLOCK) < 24, "50 ms a block"
    assert rig.device.costs(BLOCK).lag_nbytes == rig.transfer.num_at_once(BLOCK) * BLOCK
    rig.io(FAST)
    for _ in range(12):
        rig.read("abcd")
    assert rig.transfer.num_at_once(BLOCK) == 34, "it has become fast"


def test_what_is_being_read_and_what_waits_is_ahead_of_a_new_read(rig, soon):
    rig.teach()
    assert rig.device.costs(BLOCK).ahead_nbytes == 0
    rig.slow.stall()
    batch = rig.counted.begin_read(chain("abcd"), [memoryview(bytearray(BLOCK))] * 4)
    ticket = rig.transfer.read(batch, nbytes=4 * BLOCK)
    assert rig.device.costs(BLOCK).ahead_nbytes == 4 * BLOCK
    costs = rig.device.costs(BLOCK, 2 * BLOCK)
    assert (costs.ahead_nbytes, costs.lag_nbytes) == (6 * BLOCK, BLOCK)
    ticket.cancel()
    rig.slow.resume()
    assert ticket.wait(SOON)
    assert rig.device.costs(BLOCK).ahead_nbytes == 0


def test_a_read_that_failed_teaches_no_speed(rig):
    rig.teach(SLOW)
    before = rig.device.costs(BLOCK).read_s(4 * BLOCK)
    rig.io(BAD)
    rig.read("abcd")
    rig.io(SLOW)
    rig.read("abcd")
    assert rig.state.breaker == "closed"
    assert rig.device.costs(BLOCK).read_s(4 * BLOCK) == pytest.approx(before, rel=0.2)
    assert rig.state.num_observed == 5, "what the medium refused says nothing of its speed"


def test_blocks_that_went_meanwhile_were_not_read_fast(rig, monkeypatch):
    rig.teach(SLOW)
    before = rig.device.costs(BLOCK).read_s(16 * BLOCK)
    monkeypatch.setattr(rig.counted, "lookup", len)
    for _ in range(4):
        assert rig.read("abcd" + "x" * 12) == 4
    assert rig.device.costs(BLOCK).read_s(16 * BLOCK) > 0.6 * before


def test_a_read_that_takes_no_time_is_a_read(rig):
    """The clock of a machine may stand still for as long as a read takes."""
    rig.put("abcd")
    rig.io(Fault())
    assert rig.read("abcd") == 4
    rig.store.flush(SOON)
    assert not rig.memory.index._reserved


# ---------------------------------------------------------------------------- what opens and closes


def test_a_stall_opens_the_breaker_and_who_waits_goes_on(rig, soon):
    assert stalled(rig, soon) == 0
    state = rig.state
    assert (state.breaker, state.num_opened) == ("stall", 1)
    assert rig.device.costs(BLOCK) is None
    assert not rig.devices.may_read("file")


def test_a_stall_opens_it_only_after_far_longer_than_a_read_takes(rig, soon):
    """Of a device of 40 s a block, a read of one is no stall after 100 s."""
    rig.teach(Fault(latency_s=40.0))
    rig.memory.discard_namespace(NAMESPACE.id)
    rig.slow.stall()
    batch = rig.counted.begin_read(chain("a"), [memoryview(bytearray(BLOCK))])
    ticket = rig.transfer.read(batch, nbytes=BLOCK)
    soon(lambda: rig.slow.num_stalled)
    rig.clock.skip(100.0)
    rig.device.tick()
    assert not rig.device.is_open
    rig.clock.skip(9000.0)
    rig.device.tick()
    assert rig.state.breaker == "stall"
    ticket.cancel()
    rig.slow.resume()
    assert ticket.wait(SOON)


def test_an_open_breaker_is_closed_by_probes_alone(rig, soon):
    stalled(rig, soon)
    rig.slow.resume()
    soon(lambda: not rig.transfer._unfinished)
    for _ in range(8):
        rig.read("abcd")
        assert rig.device.is_open, "a user's read closes nothing"
    begun = rig.counted.num_begun
    num_probes = 0
    while rig.device.is_open:
        assert rig.tick(after_s=1.0) == 1
        num_probes += 1
    assert 3 <= num_probes <= 4
    assert rig.counted.num_begun == begun + num_probes
    assert rig.state.breaker == "closed"
    assert rig.read("abcd") == 4
    assert rig.state.num_opened == 1


def test_one_probe_at_a_time_asks_a_device_that_stands_still(rig, soon):
    stalled(rig, soon)
    begun = rig.counted.num_begun
    for _ in range(30):
        rig.clock.skip(10.0)
        rig.device.tick()
    assert rig.state.num_probes == 1
    assert rig.counted.num_begun == begun + 1
    rig.slow.resume()
    rig.settle()


def test_a_device_that_comes_back_slow_is_known_as_slow(rig, soon):
    stalled(rig, soon)
    rig.slow.resume()
    soon(lambda: not rig.transfer._unfinished)
    rig.io(Fault(latency_s=0.4))
    while rig.device.is_open:
        assert rig.tick(after_s=1.0) == 1
        assert rig.state.num_probes < 10
    assert rig.device.costs(BLOCK).read_s(BLOCK) > 0.39


def test_two_failed_reads_open_it_and_failed_probes_keep_it_open_ever_more_seldom(rig):
    rig.teach()
    rig.io(BAD)
    rig.read("abcd")
    assert not rig.device.is_open
    rig.read("abcd")
    assert rig.state.breaker == "errors"
    probes = sum(rig.tick(after_s=0.5) for _ in range(100))
    assert 8 <= probes <= 15, "in 50 s: after 0.5, 1, 2, 4 and then every 5"
    assert rig.device.is_open
    rig.io(FAST)
    assert sum(rig.tick(after_s=5.0) for _ in range(4)) >= 3
    assert not rig.device.is_open


def test_a_failed_read_between_good_ones_opens_nothing(rig):
    rig.teach()
    for _ in range(5):
        rig.io(BAD)
        rig.read("abcd")
        rig.io(FAST)
        rig.read("abcd")
    assert not rig.device.is_open


def test_a_read_that_takes_far_longer_than_expected_opens_it(rig):
    rig.teach()
    rig.io(Fault(latency_s=1.0))
    rig.read("abcd")
    assert rig.state.breaker == "slow"


def test_a_read_that_is_late_by_little_opens_nothing(rig):
    """Twenty times what it takes, by less than another process may hold up this one."""
    rig.teach(path="a")
    rig.io(Fault(latency_s=0.02))
    rig.read("a")
    assert not rig.device.is_open
