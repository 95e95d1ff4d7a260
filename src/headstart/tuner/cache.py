"""The blocks that one simulated tier holds, for many tiers and long traces: `lru` and `fifo` only.

Stands for the store's index (`headstart.index`, `headstart.room`) where only places matter: blocks
all have one size. What is held of a prompt is a prefix of it, and leaves go first, by the store's
own queue of leaves. For these two policies a block's priority is a clock, of its last use or of
when it came, which needs no call a block. Tests compare it with `headstart.tuner.simulate`, which
drives the policies' own objects, and with the store.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from headstart.policies import LeafQueue
from headstart.tuner.recorded import NO_PARENT


class Cache:
    """One tier. Blocks are numbers; `parent`, which is not changed, may be shared by tiers."""

    def __init__(self, parent: list[int], capacity_blocks: int, *, is_fifo: bool = False) -> None:
        """14 bytes a block of the trace. Without `is_fifo` it is `lru`."""
        self._parent, self._free, self._is_fifo = parent, capacity_blocks, is_fifo
        self.is_held = bytearray(len(parent))
        """1 at each block that is; changed only by `store` and `remove`."""
        self._num_children = array("i", bytes(4 * len(parent)))
        self._priority = array("q", bytes(8 * len(parent)))
        self._queue = LeafQueue(self._candidate)
        self._clock = 0
        self._pinned: Sequence[int] = ()

    def held(self, blocks: Sequence[int], start: int = 0) -> int:
        """The end of the run of held blocks that begins at `start`; `start`: there is none."""
        is_held = self.is_held
        for index in range(start, len(blocks)):
            if not is_held[blocks[index]]:
                return index
        return len(blocks)

    def touch(self, blocks: Sequence[int]) -> None:
        """Count a use of held blocks."""
        if self._is_fifo:
            return
        self._clock += 1
        priority, clock = self._priority, self._clock
        for block in blocks:
            priority[block] = clock

    def store(self, new: Sequence[int], pinned: Sequence[int] = ()) -> tuple[int, list[int]]:
        """Store a run of blocks of a prompt, in its order, as far as there is room.

        Returns how many are stored, and what was evicted for them, first to last. `pinned` are
        blocks that stay, as all above them do: the one that the first of `new` hangs on, for one.
        """
        evicted = self._make_room(len(new), pinned) if self._free < len(new) else []
        new = new[: self._free]
        self._clock += 1
        is_held, priority, clock = self.is_held, self._priority, self._clock
        parent, num_children = self._parent, self._num_children
        for block in new:
            is_held[block] = 1
            priority[block] = clock
            above = parent[block]
            if above != NO_PARENT:
                num_children[above] += 1
        self._free -= len(new)
        for block in (*new[-1:], *pinned):  # a pinned one may have lost its place in the queue
            self._offer(block)
        return len(new), evicted

    def remove(self, block: int) -> None:
        """Hold a held block no longer."""
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
        its child was, and where they are equal, its number is the lowest.
        """
        is_held, num_children, priority = self.is_held, self._num_children, self._priority
        while True:
            evicted.append(block)
            is_held[block] = 0
            self._free += 1
            block = self._parent[block]
            if block == NO_PARENT:
                return
            num_children[block] -= 1
            if num_children[block] or not is_held[block]:
                return
            if self._free >= count or priority[block] > coldest or block in self._pinned:
                self._queue.offer(block, priority[block])
                return

    def _offer(self, block: int) -> None:
        if self.is_held[block] and not self._num_children[block]:
            self._queue.offer(block, self._priority[block])

    def _candidate(self, block: int) -> int | None:
        if not self.is_held[block] or self._num_children[block] or block in self._pinned:
            return None
        return self._priority[block]
