"""What a node asks of a store beyond an engine: usage, forgetting a model, loads cut short."""

import threading

import pytest

from headstart.errors import ClosedError
from headstart.keys import keys_from_hashes
from headstart.testing import BLOCK_NBYTES, kit_namespace
from headstart.testing.ledger import payload
from headstart.types import Outcome

DONE = Outcome.DONE
SOON = 10.0
SLOT = 4096 + BLOCK_NBYTES
NAMESPACE, OTHER = kit_namespace(), kit_namespace("other")


def chain(path, namespace=NAMESPACE):
    return keys_from_hashes(namespace, [content.encode() for content in path])


def blocks_of(run):
    return [payload(run.namespace, key, 0, run.block_nbytes) for key in run]


def put_other(world, path):
    world.store.open_namespace(OTHER)
    run = chain(path, OTHER)
    assert world.store.store(run, blocks_of(run)) == [DONE] * len(run)
    assert world.store.flush(SOON)


# --------------------------------------------------------------------------- usage and namespaces


def test_usage_by_tier_and_namespace(world):
    nothing = {NAMESPACE.id: 0}
    assert world.store.usage() == {"memory": nothing, "file0": nothing}
    world.put("abc")
    put_other(world, "xy")
    held = {NAMESPACE.id: 3 * BLOCK_NBYTES, OTHER.id: 2 * BLOCK_NBYTES}
    assert world.store.usage() == {"memory": held, "file0": held}
    world.memory.discard(chain("abc").keys[1:])
    assert world.store.usage() == {
        "memory": held | {NAMESPACE.id: BLOCK_NBYTES},
        "file0": held,
    }


def test_after_a_restart_the_file_tier_tells_of_models_that_nobody_opened(make):
    world = make()
    put_other(world, "xy")
    world.store.close()
    again = make()
    assert again.store.usage() == {
        "memory": {NAMESPACE.id: 0},
        "file0": {NAMESPACE.id: 0, OTHER.id: 2 * BLOCK_NBYTES},
    }
    assert again.store.discard_namespace(OTHER.id) == 2
    assert again.store.usage()["file0"][OTHER.id] == 0
    again.store.open_namespace(OTHER)
    assert again.store.lookup(chain("xy", OTHER)).num_blocks == 0


def test_a_model_is_forgotten_in_every_tier(world):
    world.put("abcd")
    put_other(world, "xy")
    world.memory.discard(chain("ab").keys[1:])
    assert world.store.discard_namespace(NAMESPACE.id) == 4, "the most that a tier forgot"
    assert world.store.lookup(chain("abcd")).by_tier == {"memory": 0, "file0": 0}
    assert world.store.lookup(chain("xy", OTHER)).num_blocks == 2
    assert world.store.discard_namespace(NAMESPACE.id) == 0
    world.put("abcd")
    assert world.get("abcd") == 4


def test_a_model_that_nobody_knows(world):
    world.put("ab")
    assert world.store.discard_namespace(OTHER.id) == 0
    assert world.get("ab") == 2


def test_a_lease_outlives_its_model(world):
    world.put("abcd")
    with world.store.load(chain("abcd")) as lease:
        assert world.store.discard_namespace(NAMESPACE.id) == 4
        for number in range(12):
            world.put([f"r{number}"])
        world.check(lease)
    world.settled()


def test_a_closed_store_raises(make):
    world = make()
    world.store.close()
    for call in (world.store.usage, lambda: world.store.discard_namespace(NAMESPACE.id)):
        with pytest.raises(ClosedError):
            call()


# ------------------------------------------------------------------------------ loads cut short


class Asked:
    """A `go_on` that says no once `limit` blocks are ready."""

    def __init__(self, limit):
        self.limit, self.ready = limit, []

    def __call__(self, ready_blocks, tier):
        assert tier == "file0"
        self.ready.append(ready_blocks)
        return ready_blocks < self.limit


@pytest.fixture
def half_way(world, monkeypatch):
    """Lets the file tier read the first `num_ready` blocks one by one, and no more until set."""
    monkeypatch.setattr("headstart.tiers.filebatch.COALESCE_NBYTES", 1)
    volume, flows = world.file.volume, threading.Event()

    def make(num_ready):
        class Stalling:
            capacity_nbytes, direct = volume.capacity_nbytes, volume.direct
            close, write = staticmethod(volume.close), staticmethod(volume.write)

            def read(self, offset, buffers):
                if offset // SLOT >= num_ready:
                    flows.wait(SOON)
                return volume.read(offset, buffers)

        world.file.volume = Stalling()
        return flows

    yield make
    flows.set()


def test_it_is_asked_while_it_waits_and_told_how_far_it_is(world, half_way):
    world.put("abcdef")
    world.forget_memory()
    half_way(3)
    asked = Asked(3)
    with world.store.load(chain("abcdef"), go_on=asked) as lease:
        assert (lease.ready_blocks, lease.late) == (3, True)
        world.check(lease)
    assert asked.ready == sorted(asked.ready)
    assert asked.ready[-1] == 3
    assert world.store.stats().num_late == 1


def test_blocks_that_memory_holds_count_as_ready(world, half_way):
    world.put("abcdef")
    world.memory.discard(chain("abcdef").keys[2:])
    half_way(4)
    asked = Asked(4)
    with world.store.load(chain("abcdef"), go_on=asked) as lease:
        assert lease.ready_blocks == 4
        assert lease.by_tier == {"memory": 2, "file0": 2}
        world.check(lease)
    assert min(asked.ready) >= 2


def test_no_at_once_is_what_memory_holds(world):
    world.put("abcd")
    world.memory.discard(chain("abcd").keys[1:])
    world.stall()
    with world.store.load(chain("abcd"), go_on=lambda ready, tier: False) as lease:
        assert (lease.ready_blocks, lease.late) == (1, True)
        world.check(lease)
    world.slow.resume()
    world.flowing = True


def test_what_memory_holds_asks_nobody(world):
    world.put("abcd")
    asked = Asked(0)
    with world.store.load(chain("abcd"), go_on=asked) as lease:
        assert (lease.ready_blocks, lease.late) == (4, False)
    assert asked.ready == []


def test_a_yes_to_the_end_is_a_whole_load(world):
    world.put("abcdef")
    world.forget_memory()
    asked = Asked(100)
    with world.store.load(chain("abcdef"), timeout_s=SOON, go_on=asked) as lease:
        assert (lease.ready_blocks, lease.late) == (6, False)
        world.check(lease)


@pytest.mark.parametrize("timeout_s", [0.0, 0.03])
def test_the_time_ends_it_also(world, timeout_s):
    world.put("abcd")
    world.forget_memory()
    world.stall()
    with world.store.load(
        chain("abcd"), timeout_s=timeout_s, go_on=lambda ready, tier: True
    ) as lease:
        assert (lease.ready_blocks, lease.late) == (0, True)
    world.slow.resume()
    world.flowing = True


def test_after_a_no_the_next_tier_is_not_read(make):
    world = make(num_files=2, file_blocks=8)
    world.put("abcdefgh")
    world.files[0].discard(chain("abcd").keys[3:])
    world.forget_memory()
    world.stall()
    with world.store.load(chain("abcdefgh"), go_on=lambda ready, tier: False) as lease:
        assert lease.ready_blocks == 0
        assert "file1" not in lease.by_tier
    assert world.files[1].stats().num_hits == 0
    world.slow.resume()
    world.flowing = True


def test_one_that_raises_leaves_nothing_behind(world):
    world.put("abcd")
    world.memory.discard(chain("ab").keys[1:])

    def broken(ready, tier):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        world.store.load(chain("abcd"), go_on=broken)
    world.settled()
    assert world.get("abcd") == 4


# ------------------------------------------------------------------------- reservations by offset


def test_offsets_are_where_the_views_lie(world):
    with world.store.reserve(chain("abc")) as reservation:
        for offset, data in zip(reservation.offsets, blocks_of(chain("abc")), strict=True):
            world.store.arena.view(offset, BLOCK_NBYTES)[:] = data
        assert [bytes(view) for view in reservation.views] == blocks_of(chain("abc"))
        assert reservation.commit() == [DONE] * 3
    assert world.get("abc") == 3


def test_abandoned_without_a_block_it_gives_back_once(world):
    world.put("ab")
    used = world.memory.index.slots.num_used
    reservation = world.store.reserve(chain("abcd").run(2, 4))
    assert world.memory.index.slots.num_used == used + 2
    reservation.abandon()
    reservation.abandon()
    assert world.memory.index.slots.num_used == used
    for call in (reservation.commit, lambda: reservation.views):
        with pytest.raises(ClosedError):
            call()
    world.settled()


def test_abandoned_after_its_commit_it_stays_stored(world):
    reservation = world.store.reserve(chain("ab"))
    for view, data in zip(reservation.views, blocks_of(chain("ab")), strict=True):
        view[:] = data
    assert reservation.commit() == [DONE] * 2
    reservation.abandon()
    assert world.get("ab") == 2
