"""The blocks that one simulated tier holds, by a policy of the store.

Stands for the store's index (`headstart.index`, `headstart.room`) where only places matter: blocks
all have one size, and nobody reads them. What is held of a prompt is a prefix of it, and leaves go
first, by the policy's own object and the store's own queues of leaves. Tests compare it with both
the index and the store.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from headstart.policies import (
    POLICIES,
    EvictionPolicy,
    Expiring,
    Sectioned,
    Watching,
    leaf_queue,
)
from headstart.tuner.recorded import NO_PARENT


class Now:
    """The time of the request that is simulated, in seconds: a clock for policies."""

    seconds = 0.0

    def __call__(self) -> float:
        """As a policy asks for it."""
        return self.seconds


class Cache:
    """One tier. Blocks are numbers, which are their rows; it is the policy's `Blocks`, too."""

    def __init__(
        self, parent: list[int], policy: EvictionPolicy, capacity_blocks: int, block_size: int
    ) -> None:
        """14 bytes a block of the trace; `parent`, which is not changed, may be shared by tiers."""
        self._parent, self._policy, self._size = parent, policy, block_size
        self._capacity = self._free = capacity_blocks
        self.is_held = bytearray(len(parent))
        """1 at each block that is; changed only by `store` and `remove`."""
        self._num_children = array("i", bytes(4 * len(parent)))
        self._priority = array("q", bytes(8 * len(parent)))
        self._queue = leaf_queue(policy, self._candidate, self._priority.__setitem__)
        self._clock = 0
        self._pinned: Sequence[int] = ()
        self._is_gone = policy.is_gone if isinstance(policy, Expiring) else None
        self._has_sections = isinstance(policy, Sectioned)
        self._falls = policy.name not in POLICIES
        """Whether a block that was evicted may come back colder: of the store's none does."""
        self._watching = policy if isinstance(policy, Watching) else None
        if self._watching is not None:
            self._watching.watch(self)

    def __len__(self) -> int:
        return self._capacity - self._free

    def key(self, row: int) -> int:
        """See `Blocks.key`."""
        return row

    def parent(self, row: int) -> int | None:
        """See `Blocks.parent`; one that is in another tier is none."""
        above = self._parent[row]
        return above if above != NO_PARENT and self.is_held[above] else None

    def tokens(self, row: int) -> int:
        """See `Blocks.tokens`."""
        return self._size

    def held(self, blocks: Sequence[int], start: int = 0) -> int:
        """The end of the run of held blocks that begins at `start`; `start`: there is none."""
        is_held, is_gone = self.is_held, self._is_gone
        for index in range(start, len(blocks)):
            block = blocks[index]
            if not is_held[block] or (is_gone is not None and is_gone(block)):
                return index
        return len(blocks)

    def touch(self, blocks: Sequence[int]) -> None:
        """Count a use of held blocks."""
        self._clock += 1
        priority, on_hit, clock = self._priority, self._policy.on_hit, self._clock
        for block in blocks:
            priority[block] = on_hit(row=block, priority=priority[block], clock=clock)

    def store(self, new: Sequence[int], pinned: Sequence[int] = ()) -> tuple[int, list[int]]:
        """Store a run of blocks of a prompt, in its order, as far as there is room.

        Returns how many are stored, and what was evicted for them, first to last. `pinned` are
        blocks that stay, as all above them do: the one that the first of `new` hangs on, for one.
        """
        evicted = self._make_room(len(new), pinned) if self._free < len(new) else []
        new = new[: self._free]
        self._clock += 1
        is_held, priority, clock = self.is_held, self._priority, self._clock
        parent, num_children, on_insert = self._parent, self._num_children, self._policy.on_insert
        for block in new:
            if is_held[block]:  # it was gone only for the policy, which takes it back
                old = priority[block]
                priority[block] = self._policy.on_hit(row=block, priority=old, clock=clock)
                continue
            is_held[block] = 1
            self._free -= 1
            above = parent[block]
            if above != NO_PARENT:
                num_children[above] += 1
            priority[block] = on_insert(row=block, clock=clock)
        for block in (*new[-1:], *pinned):  # a pinned one may have lost its place in the queue
            self._offer(block)
        return len(new), evicted

    def remove(self, block: int) -> None:
        """Hold a held block no longer, for another reason than room."""
        if self._watching is not None:  # else priorities are clocks, and rise when it comes back
            priority = self._priority[block]
            self._watching.on_remove(row=block, priority=priority, evicted=False)
            self._queue.forget(block)
        self.is_held[block] = 0
        self._free += 1
        above = self._parent[block]
        if above != NO_PARENT:
            self._num_children[above] -= 1
            self._offer(above)

    def _make_room(self, count: int, pinned: Sequence[int]) -> list[int]:
        """Evict until so many are free, or nothing more may go."""
        self._pinned = pinned
        evicted: list[int] = []
        while self._free < count:
            coldest = self._queue.coldest()
            if coldest is None:
                break
            self._evict_upwards(*coldest, count, evicted)
        self._pinned = ()
        return evicted

    def _evict_upwards(self, coldest: int, block: int, count: int, evicted: list[int]) -> None:
        """Evict a leaf, and from there up what would be next in the queue, without asking it.

        A parent that is a leaf now and no warmer goes before all others: these are no colder than
        its child was, and equal to it are only blocks of one prompt. With two queues the policy has
        the last word on each.
        """
        is_held, num_children, priority = self.is_held, self._num_children, self._priority
        watching, falls = self._watching, self._falls
        while True:
            if watching is not None:
                watching.on_remove(row=block, priority=priority[block], evicted=True)
            if falls:
                self._queue.forget(block)
            evicted.append(block)
            is_held[block] = 0
            self._free += 1
            block = self._parent[block]
            if block == NO_PARENT:
                return
            num_children[block] -= 1
            if num_children[block] or not is_held[block]:
                return
            if (
                self._has_sections
                or self._free >= count
                or priority[block] > coldest
                or block in self._pinned
            ):
                self._queue.offer(block, priority[block])
                return

    def _offer(self, block: int) -> None:
        if self.is_held[block] and not self._num_children[block]:
            self._queue.offer(block, self._priority[block])

    def _candidate(self, block: int) -> int | None:
        if not self.is_held[block] or self._num_children[block] or block in self._pinned:
            return None
        return self._priority[block]
