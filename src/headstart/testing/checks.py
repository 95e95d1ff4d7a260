"""What must hold for a tier at any time, asked through its public methods alone."""

from __future__ import annotations

from collections.abc import Sequence

from headstart.errors import ClosedError
from headstart.testing.harness import BLOCK_NBYTES
from headstart.testing.rig import TierRig
from headstart.types import KeyChain, Outcome, TierStats


def bounded_stats(rig: TierRig) -> TierStats:
    """The tier's statistics, which must be within its capacity."""
    stats = rig.tier.stats()
    assert 0 <= stats.used_nbytes <= stats.capacity_nbytes, f"over capacity: {stats}"
    if all(namespace.layout.block_nbytes == BLOCK_NBYTES for namespace in rig.namespaces):
        assert 0 <= stats.num_blocks <= rig.capacity, f"over {rig.capacity} blocks: {stats}"
    return stats


def held(rig: TierRig, chain: KeyChain) -> list[bool]:
    """Whether each block is held, asked one by one: a hole in a prefix shows."""
    return [rig.tier.lookup([key]) == 1 for key in chain]


def check_closed(rig: TierRig) -> None:
    """No block that was ever written is held without its parent."""
    parents = rig.ledger.parents
    held_keys = {key for key in parents if rig.tier.lookup([key]) == 1}
    for key in held_keys:
        parent = parents[key]
        assert parent is None or parent in held_keys, "a block is held, its parent is not"


def check_write(rig: TierRig, chain: KeyChain, outcomes: Sequence[Outcome]) -> None:
    """Nothing happened since the write: what is DONE is readable, the rest is not held."""
    done = [outcome is Outcome.DONE for outcome in outcomes]
    assert held(rig, chain) == done, f"outcomes {outcomes}, but held are {held(rig, chain)}"
    num_done = sum(done)
    assert all(done[:num_done]), f"a block is stored without its parent: {outcomes}"
    rig.expect(chain.run(0, num_done))


def check_books(rig: TierRig) -> None:
    """Blocks held are those stored and not evicted, discarded or dropped since."""
    stats = bounded_stats(rig)
    gone = stats.num_evicted + stats.num_discarded + stats.num_dropped
    assert stats.num_blocks == rig.num_blocks_at_open + stats.num_stored - gone, stats


def check_invariants(rig: TierRig) -> None:
    """Closed prefixes, statistics within bounds, and the tier's own `check_invariants()`.

    Does nothing for a tier that the test has closed.
    """
    try:
        bounded_stats(rig)
        check_closed(rig)
    except ClosedError:
        return
    own = getattr(rig.tier, "check_invariants", None)
    if own is not None:
        own()
