"""The memory tier passes the contract, and what only it promises."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from headstart.errors import ConfigError
from headstart.testing import (
    BLOCK_NBYTES,
    Ending,
    TierContract,
    TierHarness,
    TierRig,
    aligned_buffers,
    kit_namespace,
    tier_state_machine,
)
from headstart.tiers import MemoryTier, Tier
from headstart.types import Outcome
from headstart.units import PAGE_NBYTES


class MemoryHarness:
    """Memory of 16 blocks in slabs of four."""

    durable = False
    capacity_blocks = 16
    damages = frozenset()
    skips = MappingProxyType({})
    buffers = staticmethod(aligned_buffers)
    policy = "lru"

    def make(self) -> Tier:
        return MemoryTier(
            capacity_nbytes=self.capacity_blocks * BLOCK_NBYTES,
            slab_nbytes=4 * BLOCK_NBYTES,
            policy=self.policy,
        )

    def reopen(self, tier: Tier, ending: Ending) -> Tier:
        raise NotImplementedError

    def damage(self, tier, key, damage, donor) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class FifoHarness(MemoryHarness):
    policy = "fifo"
    skips = MappingProxyType(
        {"test_what_is_touched_is_not_evicted": "fifo evicts by age, whatever is touched"}
    )


_OUTLIVE = "blocks that were read outlive new ones, by which these tests look for lost room"
_OUTLIVED = {
    "lfu-da": ("test_abandoned_writes_leak_no_room", "test_abandoned_reads_leak_no_pins"),
    "s3fifo": (
        "test_abandoned_writes_leak_no_room",
        "test_abandoned_reads_leak_no_pins",
        "test_no_room_is_lost_between_threads",
    ),
}


class OtherHarness(MemoryHarness):
    def __init__(self, policy):
        self.policy = policy
        if policy in _OUTLIVED:
            self.skips = MappingProxyType(dict.fromkeys(_OUTLIVED[policy], _OUTLIVE))


class TestMemoryTier(TierContract):
    tier_class = MemoryTier

    @pytest.fixture
    def harness(self) -> TierHarness:
        return MemoryHarness()


class TestMemoryTierFifo(TierContract):
    tier_class = MemoryTier

    @pytest.fixture
    def harness(self) -> TierHarness:
        return FifoHarness()


class TestMemoryTierOthers(TierContract):
    tier_class = MemoryTier

    @pytest.fixture(params=["lfu-da", "s3fifo", "ttl=1h", "tlru", "cost"])
    def harness(self, request) -> TierHarness:
        return OtherHarness(request.param)


TestMemoryTierStates = tier_state_machine(MemoryHarness, max_examples=25).TestCase


@pytest.fixture
def rig():
    with TierRig(MemoryHarness()) as rig:
        yield rig


def test_a_view_is_the_slot_itself(rig):
    rig.store(rig.chain("ab"))
    tier = rig.tier
    number, nbytes = tier.namespaces[rig.namespace.id], BLOCK_NBYTES
    rows = tier.index.pin(rig.chain("ab").keys, namespace=number, block_nbytes=nbytes)
    views = [tier.view(tier.index.rows.offset[row], nbytes) for row in rows]
    targets = aligned_buffers(2, nbytes)
    batch = tier.begin_read(rig.chain("ab"), targets)
    for index in range(2):
        batch.run(index)
    assert batch.finish() == [Outcome.DONE] * 2
    assert [bytes(view) for view in views] == [bytes(target) for target in targets]
    tier.index.unpin(rows)


@pytest.mark.parametrize("capacity", [0, 1, PAGE_NBYTES - 1])
def test_a_capacity_smaller_than_a_page_is_refused(capacity):
    with pytest.raises(ConfigError, match=r"memory\.capacity"):
        MemoryTier(capacity_nbytes=capacity)


def test_the_smallest_capacity_holds_a_block():
    tier = MemoryTier(capacity_nbytes=PAGE_NBYTES)
    tier.open_namespace(kit_namespace("small", PAGE_NBYTES))
    with pytest.raises(ConfigError, match=r"does not fit .* set a larger capacity"):
        tier.open_namespace(kit_namespace())
    tier.close()


def test_an_unknown_policy_or_slab_allocates_nothing():
    for options in ({"policy": "arc"}, {"slab_nbytes": 1 << 40}, {"slab_nbytes": 5000}):
        with pytest.raises(ConfigError):
            MemoryTier(capacity_nbytes=1 << 20, **options)


def test_storing_behind_a_block_is_no_use_of_it(rig):
    index, chain = rig.tier.index, rig.chain("ab")
    rig.store(chain.run(0, 1))
    (row,) = index.pin(chain.keys[:1], namespace=1, block_nbytes=BLOCK_NBYTES, is_use=False)
    index.unpin([row])
    before = index.rows.priority[row]
    rig.store(chain.run(1, 2))
    assert index.lookup(chain.keys) == 2
    assert index.rows.priority[row] == before


def test_a_policy_is_told_the_tokens_of_a_block(rig):
    assert rig.tier.index.block_tokens == {1: rig.namespace.layout.block_size}
