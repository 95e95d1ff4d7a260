"""The seam for eviction: a policy is a pure rule that gives blocks priorities.

Which blocks *may* go is not the policy's affair: prefixes are closed, so only leaves (blocks
without children) that nobody has pinned are candidates, and `LeafQueue` hands out the one with the
lowest priority. A policy says only what that priority is. The store and the tuner's simulator
drive the same objects, so that a simulated hit rate is the real one.

`clock` counts operations on the index: it rises by one with every batch of hits or inserts.
Priorities are whole numbers in [0, 2**63).
"""

from __future__ import annotations

from typing import Protocol


class EvictionPolicy(Protocol):
    """Priorities of blocks; the lowest leaves first. Deterministic; one object per index."""

    @property
    def name(self) -> str:
        """The name used in settings."""

    def on_insert(self, *, clock: int, block_nbytes: int) -> int:
        """Priority of a block that was just stored."""

    def on_hit(self, *, priority: int, clock: int, block_nbytes: int) -> int:
        """New priority of a block that was just hit, given its present one."""

    def on_evict(self, *, priority: int) -> None:
        """A block of this priority was evicted for room."""
