"""Room for blocks of several sizes, against a model that knows every byte."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headstart.errors import ConfigError
from headstart.slots import SlabPool, default_slab_nbytes
from headstart.units import PAGE_NBYTES

SLAB = 12 * PAGE_NBYTES
SIZES = [PAGE_NBYTES, 2 * PAGE_NBYTES, 3 * PAGE_NBYTES, 5 * PAGE_NBYTES, SLAB]


def pool_of(num_slabs):
    return SlabPool(capacity_nbytes=num_slabs * SLAB, slab_nbytes=SLAB)


class SlotStates(RuleBasedStateMachine):
    """The model is every slot handed out: offset to size. Slots never overlap."""

    def __init__(self):
        super().__init__()
        self.pool = pool_of(5)
        self.held = {}

    def slab_sizes(self):
        return {offset // SLAB: size for offset, size in self.held.items()}

    @rule(size=st.sampled_from(SIZES), count=st.integers(1, 8))
    def allocate(self, size, count):
        for _ in range(count):
            offset = self.pool.allocate(size)
            if offset is None:
                assert len(self.slab_sizes()) == 5, "a slab is free"
                in_own = [o for o, s in self.held.items() if s == size]
                own_slabs = {o // SLAB for o in in_own}
                assert len(in_own) == len(own_slabs) * (SLAB // size), "a slot is free"
                return
            assert offset % SLAB % size == 0
            assert offset % SLAB + size <= SLAB
            assert 0 <= offset < 5 * SLAB
            assert self.slab_sizes().get(offset // SLAB, size) == size, "two sizes in one slab"
            assert offset not in self.held
            self.held[offset] = size

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        offset = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[offset]
        self.pool.free(offset)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def empty_a_slab(self, data):
        slab = data.draw(st.sampled_from(sorted(self.slab_sizes())))
        for offset in [offset for offset in self.held if offset // SLAB == slab]:
            del self.held[offset]
            self.pool.free(offset)

    @rule()
    def adopt(self):
        """A new pool takes over what the old one handed out, as after a restart."""
        self.pool = pool_of(5)
        self.pool.adopt(
            np.array(list(self.held), np.uint64), np.array(list(self.held.values()), np.uint64)
        )

    @invariant()
    def equals_the_model(self):
        self.pool.check_invariants()
        assert self.pool.used_nbytes == sum(self.held.values())
        assert self.pool.num_used == len(self.held)
        slabs = self.slab_sizes()
        for size in SIZES:
            assert self.pool.slabs_of(size) == sorted(n for n, s in slabs.items() if s == size)


TestSlots = SlotStates.TestCase


@pytest.mark.parametrize("size", SIZES)
def test_all_of_a_capacity_is_usable(size):
    pool = pool_of(3)
    offsets = [pool.allocate(size) for _ in range(3 * (SLAB // size))]
    assert len(set(offsets)) == len(offsets)
    assert None not in offsets
    assert pool.allocate(size) is None
    for offset in offsets:
        pool.free(offset)
    assert pool.used_nbytes == 0
    pool.check_invariants()


def test_a_slab_changes_its_size_when_it_is_empty():
    pool = pool_of(1)
    first, second = pool.allocate(SIZES[1]), pool.allocate(SIZES[1])
    assert pool.allocate(SIZES[2]) is None
    pool.free(first)
    assert pool.allocate(SIZES[2]) is None
    pool.free(second)
    assert pool.allocate(SIZES[2]) == 0


def test_a_freed_slot_is_used_before_another_slab_is_cut():
    pool = pool_of(2)
    offsets = [pool.allocate(SIZES[0]) for _ in range(3)]
    pool.free(offsets[1])
    assert pool.allocate(SIZES[0]) == offsets[1]
    assert len(pool.slabs_of(SIZES[0])) == 1


def test_blocks_of_a_prompt_lie_one_after_another():
    pool = pool_of(2)
    offsets = [pool.allocate(SIZES[1]) for _ in range(6)]
    assert np.diff(offsets).tolist() == [SIZES[1]] * 5


def test_a_capacity_that_is_no_multiple_of_a_slab_is_rounded_down():
    pool = SlabPool(capacity_nbytes=2 * SLAB + PAGE_NBYTES, slab_nbytes=SLAB)
    assert (pool.num_slabs, pool.capacity_nbytes) == (2, 2 * SLAB)
    assert pool.slots_per_slab(SLAB) == 1
    assert pool.slots_per_slab(SLAB + 1) == 0


@pytest.mark.parametrize(
    ("capacity", "slab"),
    [(SLAB, 0), (SLAB, -PAGE_NBYTES), (SLAB - 1, SLAB), (0, PAGE_NBYTES), (SLAB, 5000), (SLAB, 1)],
)
def test_a_slab_is_whole_pages_within_the_capacity(capacity, slab):
    with pytest.raises(ConfigError, match="slab_nbytes"):
        SlabPool(capacity_nbytes=capacity, slab_nbytes=slab)


@given(st.integers(PAGE_NBYTES, 1 << 50))
def test_the_default_slab_fits_any_capacity(capacity):
    slab = default_slab_nbytes(capacity)
    assert slab % PAGE_NBYTES == 0
    assert PAGE_NBYTES <= slab <= capacity
    assert capacity // slab <= 1024
    SlabPool(capacity_nbytes=min(capacity, 1 << 40), slab_nbytes=min(slab, 1 << 40))


@pytest.mark.parametrize(
    ("capacity", "slab"),
    [(1 << 20, 1 << 20), (16 << 20, 1 << 20), (1 << 30, 64 << 20), (100 << 30, 1 << 30)],
)
def test_the_default_slab_is_a_sixteenth_within_limits(capacity, slab):
    assert default_slab_nbytes(capacity) == slab
