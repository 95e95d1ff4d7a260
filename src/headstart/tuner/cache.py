"""The blocks that one simulated tier holds: leaves in the order of a policy, as in the store.

Stands for the store's index (`headstart.index`, `headstart.room`) where only places matter: blocks
all have one size. What is held of a prompt is a prefix of it; a leaf is evicted first. `lru` and
`fifo` are the store's own objects behind the store's own queue of leaves.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from headstart.policies import EvictionPolicy, LeafQueue
from headstart.tuner.recorded import NO_PARENT


class Cache:
    """One tier. Blocks are numbers; `parent`, which is not changed, may be shared by tiers."""

    def __init__(
        self, parent: list[int], policy: EvictionPolicy, capacity_blocks: int, block_nbytes: int
    ) -> None:
        """`block_nbytes` is only told to the policy. 14 bytes a block of the trace."""
        self._parent, self._policy, self._nbytes = parent, policy, block_nbytes
        self._free = capacity_blocks
        self._is_held = bytearray(len(parent))
        self._num_children = array("i", bytes(4 * len(parent)))
        self._priority = array("q", bytes(8 * len(parent)))
        self._queue = LeafQueue(self._candidate)
        self._clock = 0
        self._pinned: Sequence[int] = ()

    def __contains__(self, block: int) -> bool:
        """Whether it is held."""
        return self._is_held[block] == 1

    def held(self, blocks: Sequence[int], start: int = 0) -> int:
        """The end of the run of held blocks that begins at `start`; `start`: there is none."""
        is_held = self._is_held
        for index in range(start, len(blocks)):
            if not is_held[blocks[index]]:
                return index
        return len(blocks)

    def touch(self, blocks: Sequence[int]) -> None:
        """Count a use of held blocks."""
        self._clock += 1
        priority, on_hit = self._priority, self._policy.on_hit
        clock, nbytes = self._clock, self._nbytes
        for block in blocks:
            priority[block] = on_hit(priority=priority[block], clock=clock, block_nbytes=nbytes)

    def store(self, new: Sequence[int], pinned: Sequence[int] = ()) -> tuple[int, list[int]]:
        """Store a run of blocks, each the parent of the next, as far as there is room.

        Returns how many are stored, and what was evicted for them, first to last. `pinned` are
        blocks that stay, as all above them do: the one that the first of `new` hangs on, for one.
        """
        evicted = self._make_room(len(new), pinned) if self._free < len(new) else []
        new = new[: self._free]
        self._clock += 1
        clock, nbytes, on_insert = self._clock, self._nbytes, self._policy.on_insert
        is_held, priority = self._is_held, self._priority
        parent, num_children = self._parent, self._num_children
        for block in new:
            is_held[block] = 1
            priority[block] = on_insert(clock=clock, block_nbytes=nbytes)
            above = parent[block]
            if above != NO_PARENT:
                num_children[above] += 1
        self._free -= len(new)
        for block in (*new[-1:], *pinned):  # a pinned one may have lost its place in the queue
            self._offer(block)
        return len(new), evicted

    def remove(self, block: int) -> None:
        """Hold a block no longer; nothing where it was not held."""
        if not self._is_held[block]:
            return
        self._is_held[block] = 0
        self._free += 1
        above = self._parent[block]
        if above != NO_PARENT:
            self._num_children[above] -= 1
            self._offer(above)

    def _make_room(self, count: int, pinned: Sequence[int]) -> list[int]:
        """Evict until so many are free, or nothing more may go."""
        self._pinned = pinned
        evicted = []
        while self._free < count:
            coldest = self._queue.coldest()
            if coldest is None:
                break
            priority, block = coldest
            self._policy.on_evict(priority=priority)
            self.remove(block)
            evicted.append(block)
        self._pinned = ()
        return evicted

    def _offer(self, block: int) -> None:
        if self._is_held[block] and not self._num_children[block]:
            self._queue.offer(block, self._priority[block])

    def _candidate(self, block: int) -> int | None:
        if not self._is_held[block] or self._num_children[block] or block in self._pinned:
            return None
        return self._priority[block]
