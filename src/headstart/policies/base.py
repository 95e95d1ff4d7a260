"""The seam for eviction: a policy is a rule that gives blocks priorities.

Which blocks *may* go is not the policy's affair: prefixes are closed, so only leaves (blocks
without children) that nobody has pinned are candidates, and a queue hands out the one with the
lowest priority. A policy says only what that priority is. The store and the tuner's simulator
drive the same objects, so that a simulated hit rate is the real one.

`clock` counts operations on the index: it rises by one with every batch of hits or inserts. `row`
stands for one held block; after the block has gone, another one gets its number.

Priorities are whole numbers in [0, 2**63) that only rise. Their low `CLOCK_BITS` are a clock, by
which block sizes compete with each other; what is above, if anything, is a policy's own order. A
log on disk holds only clocks: where priorities are more than that, it gets their ranks. So any
policy can go on from what another left behind, in its order, and a policy must take the priority of
a block that it was never told of for what it is: a clock.

Most policies are an `EvictionPolicy` and nothing else. Whoever drives one looks once which of the
other protocols here it satisfies; the others cost nothing.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

CLOCK_BITS = 38
CLOCK_MASK = (1 << CLOCK_BITS) - 1
_MAX_KEY = (1 << 63 - CLOCK_BITS) - 1


class EvictionPolicy(Protocol):
    """Priorities of blocks; the lowest leaves first. Deterministic; one object per index."""

    @property
    def name(self) -> str:
        """The name used in settings."""

    def on_insert(self, *, row: int, clock: int) -> int:
        """Priority of a block that was just stored."""

    def on_hit(self, *, row: int, priority: int, clock: int) -> int:
        """New priority of a block that was just hit, given its present one."""


class Blocks(Protocol):
    """What a policy can ask about the blocks that are held, by row."""

    def __len__(self) -> int:
        """Number of blocks held."""

    def key(self, row: int) -> int:
        """A number that stands for a block wherever it is and whenever it comes back."""

    def parent(self, row: int) -> int | None:
        """The row of the block before it in its prompt; None: it is the first."""

    def tokens(self, row: int) -> int:
        """Tokens in the block."""


@runtime_checkable
class Watching(Protocol):
    """A policy that asks about blocks, and learns what leaves."""

    def watch(self, blocks: Blocks) -> None:
        """Called once, before anything else."""

    def on_remove(self, *, row: int, priority: int, evicted: bool) -> None:
        """A block leaves; all can still be asked about it, and it still counts as held.

        `evicted`: as the coldest leaf. Else it was discarded, dropped, or its slab was emptied.
        """


@runtime_checkable
class Sectioned(Protocol):
    """A policy with two queues, 0 and 1, and a last word on each block before it goes."""

    def section(self, row: int) -> int:
        """The queue of a row. It changes only in `on_insert`, `on_remove` and `spare`.

        `spare` may also move ancestors of its row, which are no candidates. A block that the policy
        was never told of is in queue 0.
        """

    def first_section(self) -> int:
        """The queue to evict from now, unless it is empty."""

    def spare(self, *, row: int, priority: int) -> int | None:
        """None: the coldest of its queue may go; it will be asked about again if it stays.

        Else it stays, with this priority, no lower than its own, in the section it has now. No row
        may be spared forever.
        """


@runtime_checkable
class Expiring(Protocol):
    """A policy for which a block that is held can be gone."""

    def is_gone(self, row: int) -> bool:
        """Whether look-ups pass over it; any thread may ask. A use of it would end that."""


def pack(key: int, clock: int) -> int:
    """The priority of a policy with an order of its own: by `key`, then by `clock`.

    Both stop at the most there is room for: a policy whose keys have run out is `lru`.
    """
    if key > _MAX_KEY:
        key = _MAX_KEY
    if clock > CLOCK_MASK:
        clock = CLOCK_MASK
    return key << CLOCK_BITS | clock


def as_clocks(priorities: np.ndarray, clock: int) -> np.ndarray:
    """Priorities as clocks, in the same order: themselves if none is above `clock`, else ranks."""
    if int(priorities.max(initial=0)) <= clock:
        return priorities
    ranks: np.ndarray = np.unique(priorities, return_inverse=True)[1] + 1
    return ranks.astype(priorities.dtype)
