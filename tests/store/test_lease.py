"""Leases: what they pin, and what becomes of blocks that come late."""

import threading
import time

import pytest

from headstart.keys import keys_from_hashes
from headstart.testing import BLOCK_NBYTES, kit_namespace
from headstart.testing.ledger import payload
from headstart.types import Outcome

DONE, FULL, ORPHAN = Outcome.DONE, Outcome.FULL, Outcome.ORPHAN
SOON = 10.0
SLOT = 4096 + BLOCK_NBYTES
NAMESPACE = kit_namespace()


def chain(path, namespace=NAMESPACE):
    return keys_from_hashes(namespace, [content.encode() for content in path])


def blocks_of(run):
    return [payload(run.namespace, key, 0, run.block_nbytes) for key in run]


# ---------------------------------------------------------------------------------- leases and pins


def test_a_leased_block_is_not_evicted(make):
    world = make(memory_blocks=8)
    world.put("abcd")
    lease = world.store.load(chain("abcd"))
    for number in range(20):
        world.put([f"r{number}"])
    world.check(lease)
    lease.close()
    for number in range(20, 30):
        world.put([f"r{number}"])
    assert world.memory.lookup(chain("abcd").keys) == 0, "after the lease it can go"
    assert world.get("abcd") == 4


def test_a_lease_under_discard_keeps_its_bytes(world):
    world.put("abcd")
    lease = world.store.load(chain("abcd"))
    assert world.store.discard(chain("a")) == 4
    for number in range(12):
        world.put([f"r{number}"])
    world.check(lease)
    assert world.store.lookup(chain("abcd")).num_blocks == 0
    lease.close()
    world.settled()


def test_a_lease_is_closed_once(world):
    world.put("ab")
    lease = world.store.load(chain("ab"))
    lease.close()
    lease.close()
    assert (lease.ready_blocks, lease.views) == (0, [])
    world.settled()


def test_when_memory_is_pinned_full_leases_are_shorter_and_stores_full(make):
    world = make(memory_blocks=8)
    world.put("abcdefgh")
    world.forget_memory()
    with world.store.load(chain("abcdef")) as first:
        assert first.ready_blocks == 6
        world.put("rs")
        with world.store.load(chain("rs")):
            run = chain("xyz")
            assert world.store.store(run, blocks_of(run)) == [FULL] * 3
            with world.store.load(chain("abcdefgh")) as second:
                world.check(second)
                assert second.ready_blocks == 6
        assert world.get("abcdefgh") == 8
    world.settled()


# --------------------------------------------------------------------------------------- late loads


def test_a_late_load_gives_what_is_ready_in_time(world):
    world.put("abcdef")
    world.put("abxy", start=2)
    world.store.flush()
    world.memory.discard(chain("abc").keys[2:])
    world.memory.discard(chain("abxy").keys[2:])
    world.slow.stall()
    started = time.monotonic()
    lease = world.store.load(chain("abcdef"), timeout_s=0.03)
    assert time.monotonic() - started < 2.0
    assert (lease.ready_blocks, lease.late) == (2, True)
    world.check(lease)
    assert world.store.stats().num_late == 1
    lease.close()
    world.settled()


def late_lease(world):
    """A lease of "abcdef" in which blocks 0 and 1 came in time and the rest is stalled."""
    world.put("abcdef")
    world.forget_memory()
    stalled = threading.Event()
    volume = world.file.volume

    class Stalling:
        capacity_nbytes, direct = volume.capacity_nbytes, volume.direct
        close, write = staticmethod(volume.close), staticmethod(volume.write)

        def read(self, offset, buffers):
            if offset // SLOT >= 2:
                stalled.wait(SOON)
            return volume.read(offset, buffers)

    world.file.volume = Stalling()
    lease = world.store.load(chain("abcdef"), timeout_s=0.05)
    return lease, stalled


@pytest.fixture
def one_by_one(monkeypatch):
    """Each block by a call of its own."""
    monkeypatch.setattr("headstart.tiers.filebatch.COALESCE_NBYTES", 1)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("closed_first", [True, False])
def test_what_comes_late_is_published_later_and_nothing_leaks(world, closed_first):
    lease, stalled = late_lease(world)
    assert (lease.ready_blocks, lease.late, lease.by_tier["file0"]) == (2, True, 2)
    world.check(lease)
    if closed_first:
        lease.close()
        assert world.memory.lookup(chain("abcdef").keys) == 0
        stalled.set()
        world.wait_for(lambda: not world.memory.index._reserved)
    else:
        stalled.set()
        world.wait_for(lambda: world.transfers[0]._running_nbytes == 0)
        world.check(lease)
        lease.close()
    assert world.memory.lookup(chain("abcdef").keys) >= 2
    world.settled()
    assert world.get("abcdef") == 6
    world.settled()


@pytest.mark.usefixtures("one_by_one")
def test_a_late_lease_keeps_its_bytes_whatever_others_do(make):
    world = make(memory_blocks=8)
    lease, stalled = late_lease(world)
    world.check(lease)
    for number in range(10):
        run = chain([f"r{number}"])
        world.store.store(run, blocks_of(run))
        world.check(lease)
    stalled.set()
    world.wait_for(lambda: world.transfers[0]._running_nbytes == 0)
    for number in range(10):
        run = chain([f"s{number}"])
        world.store.store(run, blocks_of(run))
        world.check(lease)
    lease.close()
    world.settled()


@pytest.mark.usefixtures("one_by_one")
def test_another_load_brings_in_what_a_late_lease_has_borrowed(world):
    lease, stalled = late_lease(world)
    other = []
    loader = threading.Thread(target=lambda: other.append(world.store.load(chain("abcdef"))))
    loader.start()
    time.sleep(0.02)
    stalled.set()
    loader.join(SOON)
    world.check(other[0])
    world.check(lease)
    assert other[0].ready_blocks == 6
    lease.close()
    world.check(other[0])
    other[0].close()
    world.settled()
    assert world.store.stats().tiers["memory"].num_blocks == 6


def test_no_time_at_all_is_what_memory_holds(world):
    world.put("abcd")
    world.store.flush()
    world.memory.discard(chain("abc").keys[2:])
    world.slow.stall()
    assert world.get("abcd", timeout_s=0.0) == 2
    assert world.get("abcd", timeout_s=-1.0) == 2
    world.settled()


def test_a_load_in_time_is_not_late(world):
    world.put("abcd")
    world.forget_memory()
    assert world.get("abcd", timeout_s=SOON) == 4
    assert world.store.stats().num_late == 0


def test_two_loads_of_one_chain_at_once(world):
    world.put("abcdef")
    world.forget_memory()
    world.slow.stall()
    leases = []
    loaders = [
        threading.Thread(target=lambda: leases.append(world.store.load(chain("abcdef"))))
        for _ in range(2)
    ]
    for loader in loaders:
        loader.start()
    world.wait_for(lambda: world.slow.num_stalled >= 2)
    world.slow.resume()
    for loader in loaders:
        loader.join(SOON)
    for lease in leases:
        world.check(lease)
        assert lease.ready_blocks == 6
        lease.close()
    world.settled()
    assert world.memory.stats().num_blocks == 6


def test_an_interrupted_load_leaks_nothing(world, monkeypatch):
    """Ctrl-C while a device is waited for."""
    world.put("abcd")
    world.forget_memory()
    world.slow.stall()

    def interrupt(self, timeout_s=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("headstart.transfer.Ticket.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            world.store.load(chain("abcd"))
    world.settled()
    assert world.get("abcd") == 4
    world.settled()
