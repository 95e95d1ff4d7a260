"""The worker's half alone: what it copies, and what it tells of it."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("vllm")

# The warnings of vLLM's own imports are not ours to mend.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

NBYTES = 4096


class Mapping:
    """A node's memory, of which `boot` is the run that is mapped and `node` the one that runs."""

    def __init__(self):
        self.boot = self.node = b"one"
        self.memory = memoryview(bytearray(8 * NBYTES))
        self.num_follows = 0
        self.closed = False

    def follow(self, boot):
        self.num_follows += 1
        self.boot = self.node
        self.memory = memoryview(bytearray(8 * NBYTES))
        return self.boot == boot

    def close(self):
        self.closed = True


class Copier:
    """Notes what it is asked to copy; `bad` are blocks that it cannot."""

    shard_nbytes = NBYTES

    def __init__(self):
        self.loaded, self.stored, self.bad = [], [], set()

    def load(self, blocks, arena):
        self._note(self.loaded, blocks)

    def store(self, blocks, arena):
        self._note(self.stored, blocks)

    def _note(self, done, blocks):
        if any(block in self.bad for block, _ in blocks):
            raise RuntimeError("bad")
        done += blocks


class Rig:
    """A worker's half between a memory and a copier."""

    def __init__(self, **options):
        from headstart.engines.vllm import step
        from headstart.engines.vllm.worker import WorkerSide

        self.step, self.mapping, self.copier = step, Mapping(), Copier()
        options = {"shard_start": 0, "block_nbytes": NBYTES, "step_nbytes": 2 * NBYTES, **options}
        self.side = WorkerSide(self.mapping, self.copier, **options)

    def copy(self, ticket, *blocks, boot=b"one"):
        pairs = tuple((block, block * NBYTES) for block in blocks)
        return self.step.Copy(ticket=ticket, request_id=f"r{ticket}", boot=boot, blocks=pairs)

    def meta(self, boot=b"one", **fields):
        return self.step.StepMeta(boot=boot, **fields)

    def run(self, meta=None, **fields):
        """One step; requests received, blocks lost, tickets done and failed."""
        meta = meta or self.meta(**fields)
        self.side.load(meta)
        self.side.store(meta)
        return self.told()

    def told(self):
        received, lost = self.side.take_received(), self.side.take_lost_blocks()
        told = self.side.take_meta()
        return received, lost, dict(told.done) if told else {}, told.failed if told else set()


@pytest.fixture
def make_rig():
    return Rig


@pytest.fixture
def rig():
    return Rig()


def test_loads_and_stores_are_told_once(rig):
    told = rig.run(loads=[rig.copy(1, 0, 1)], stores=[rig.copy(2, 2)])
    assert told == (set(), set(), {1: 1, 2: 1}, set())
    assert rig.copier.loaded == [(0, 0), (1, NBYTES)]
    assert rig.run() == (set(), set(), {}, set())
    assert set(rig.side.sums.take()) == {"load_copy_seconds", "store_copy_seconds"}


def test_a_rank_has_its_place_in_a_slot(make_rig):
    rig = make_rig(shard_start=512)
    rig.run(loads=[rig.copy(1, 1)], stores=[rig.copy(2, 2)])
    assert rig.copier.loaded == [(1, NBYTES + 512)]
    assert rig.copier.stored == [(2, 2 * NBYTES + 512)]


def test_a_lost_load_taints_what_its_step_stores(rig):
    rig.copier.bad = {1}
    told = rig.run(loads=[rig.copy(1, 0, 1), rig.copy(2, 2)], stores=[rig.copy(3, 3)])
    assert told == (set(), {0, 1}, {1: 1, 2: 1, 3: 1}, {1, 3})
    assert rig.copier.stored == []
    assert rig.run(stores=[rig.copy(4, 3)]) == (set(), set(), {4: 1}, set())


def test_steps_that_were_under_way_are_tainted_too(make_rig):
    rig = make_rig(num_batches=2)
    rig.copier.bad = {1}
    assert rig.run(loads=[rig.copy(1, 1)])[3] == {1}
    assert rig.run(stores=[rig.copy(2, 2)])[3] == {2}
    assert rig.run(stores=[rig.copy(3, 2)])[3] == set()
    assert rig.run(lost_blocks=[5], stores=[rig.copy(4, 2)])[1:] == ({5}, {4: 1}, {4})
    assert rig.run(stores=[rig.copy(5, 2)])[3] == {5}
    assert rig.run(stores=[rig.copy(6, 2)])[3] == set()


def test_a_failed_store_taints_nothing_else(rig):
    rig.copier.bad = {1}
    told = rig.run(stores=[rig.copy(1, 1), rig.copy(2, 2)])
    assert told == (set(), set(), {1: 1, 2: 1}, {1})


def test_a_load_between_steps_is_cut_into_pieces(rig):
    assert rig.run(async_loads=[rig.copy(1, 0, 1, 2), rig.copy(2, 3)]) == (set(), set(), {}, set())
    assert [block for block, _ in rig.copier.loaded] == [0, 1]
    assert rig.run() == ({"r1", "r2"}, set(), {1: 1, 2: 1}, set())
    assert [block for block, _ in rig.copier.loaded] == [0, 1, 2, 3]
    assert rig.run() == (set(), set(), {}, set())


def test_a_piece_that_fails_ends_a_load(rig):
    rig.copier.bad = {2}
    rig.run(async_loads=[rig.copy(1, 0, 1, 2, 3, 4, 5), rig.copy(2, 6)])
    received, lost, done, failed = rig.run()
    assert (received, done, failed) == ({"r1"}, {1: 1}, {1})
    assert lost == {2, 3, 4, 5}  # those before it are there
    assert rig.run() == ({"r2"}, set(), {2: 1}, set())


def test_requests_that_will_not_be_loaded_are_told(rig):
    assert rig.run(lost_blocks=[4, 5], lost_requests=["r9"]) == ({"r9"}, {4, 5}, {}, set())


def test_giving_up_tells_everything_once(rig):
    rig.run(async_loads=[rig.copy(1, 0, 1, 2)])
    meta = rig.meta(
        loads=[rig.copy(2, 3)],
        async_loads=[rig.copy(3, 4)],
        stores=[rig.copy(4, 5)],
        lost_blocks=[6],
        lost_requests=["r9"],
    )
    rig.side.load(meta)
    rig.side.give_up(meta)
    rig.side.store(meta)
    received, lost, done, failed = rig.told()
    assert received == {"r1", "r3", "r9"}
    assert lost >= {3, 4, 6}
    assert (set(done), set(done.values())) == ({1, 2, 3, 4}, {1})
    assert failed >= {2, 4}
    assert rig.run() == (set(), set(), {}, set())


def test_another_run_of_the_node_is_mapped_before_it_is_needed(rig):
    rig.run()
    rig.mapping.node = b"two"
    assert rig.run(boot=b"two") == (set(), set(), {}, set())
    assert (rig.mapping.boot, rig.mapping.num_follows) == (b"two", 1)
    rig.run(boot=b"two", loads=[rig.copy(1, 0, boot=b"two")])
    assert rig.mapping.num_follows == 1


def test_offsets_of_another_run_are_not_looked_for_in_this_one(rig):
    rig.run()
    rig.mapping.node = b"two"
    rig.run(boot=b"two")
    told = rig.run(boot=b"two", loads=[rig.copy(1, 0, 1)], stores=[rig.copy(2, 2)])
    assert told == (set(), {0, 1}, {1: 1, 2: 1}, {1, 2})
    assert not rig.copier.loaded
    told = rig.run(boot=b"two", loads=[rig.copy(3, 0, boot=b"two")])
    assert told == (set(), set(), {3: 1}, set())


def test_a_load_between_steps_outlives_its_run_of_the_node(rig):
    arenas = []
    rig.copier.load = lambda blocks, arena: arenas.append(arena)
    rig.run(async_loads=[rig.copy(1, 0, 1, 2, 3)])
    rig.mapping.node = b"two"
    assert rig.run(boot=b"two") == ({"r1"}, set(), {1: 1}, set())
    assert arenas[0] is arenas[1]
    assert rig.mapping.boot == b"two"


def test_without_a_node_nothing_is_mapped(rig):
    rig.mapping.boot = rig.mapping.node = b""
    rig.mapping.memory = memoryview(b"")
    assert rig.run(boot=b"") == (set(), set(), {}, set())
    assert rig.mapping.num_follows == 0
    told = rig.run(boot=b"", loads=[rig.copy(1, 0, boot=b"")])
    assert told == (set(), {0}, {1: 1}, {1})


def test_two_workers_tell_together(rig):
    one = rig.step.WorkerMeta(done=Counter({1: 1, 2: 1}), failed={2})
    other = rig.step.WorkerMeta(done=Counter({1: 1, 3: 1}))
    both = one.aggregate(other)
    assert (both.done, both.failed) == (Counter({1: 2, 2: 1, 3: 1}), {2})


def test_closing_gives_the_memory_up(rig):
    rig.run(loads=[rig.copy(1, 0)])
    rig.side.close()
    assert rig.mapping.closed
    assert not len(rig.side._arena)
