"""S3-FIFO: a queue on trial, a queue with second chances, a memory of what has gone."""

from __future__ import annotations

from headstart.policies.base import Blocks
from headstart.policies.byrow import ByRow

_MOST_HITS = 3
_HITS_TO_MOVE = 2
_SMALL_SHARE = 10
"""The small queue is evicted from while it has at least one in so many of the blocks."""
_SLACK = 1024


class S3FifoPolicy:
    """Evicts what was not used again soon, from a tenth of the room; the rest is harder to get out.

    A new block is on trial in the small queue. When it is the coldest there, it moves to the main
    one if it was hit twice since, else it goes, and its key is remembered for as many more
    evictions as there are blocks: if it comes back meanwhile, it starts in the main queue. In that,
    the coldest goes unless it was hit; then it loses one hit of at most three and waits again. Each
    queue is in order of arrival, and hits move nothing (Yang et al. 2023).

    Differences, since blocks are a forest and only leaves can go:

    - A block that moves to the main queue takes its ancestors along, which were hit whenever it
      was. Else they would fill the small queue, where nothing could evict them, and whatever is
      new would go at once.
    - A block that was last hit together with the child that is evicted has had its chances with it;
      else each block of a dead prompt would have its own, one after the other.
    - The small queue counts all blocks on trial, of all sizes, not only the leaves; where it has no
      leaf, the main one is evicted from, and the other way round.

    What is noted and remembered takes about 130 bytes a block. A restart forgets it, and puts all
    blocks on trial, in the order they had.
    """

    name = "s3fifo"

    def __init__(self) -> None:
        self._last = 0  # priority given last: a place in the order of arrival
        self._hits = ByRow("B", 0)
        self._hit_at = ByRow("Q", 0)  # clock of the last hit
        self._is_main = ByRow("B", 0)
        self._num_main = 0
        self._num_gone = 0
        self._gone: dict[int, int] = {}  # key -> which eviction it was

    def watch(self, blocks: Blocks) -> None:
        """See `Watching.watch`."""
        self._blocks = blocks

    def on_insert(self, *, row: int, clock: int) -> int:
        """The end of a queue."""
        self._hits[row] = self._hit_at[row] = self._is_main[row] = 0
        self._last = max(self._last + 1, clock)
        evicted = self._gone.pop(self._blocks.key(row), None)
        if evicted is not None and self._num_gone - evicted < len(self._blocks):
            self._move(row)
        return self._last

    def on_hit(self, *, row: int, priority: int, clock: int) -> int:
        """Unchanged, but counted."""
        self._last = max(self._last, clock)
        hits = self._hits[row]
        if hits < _MOST_HITS:
            self._hits[row] = hits + 1
        self._hit_at[row] = clock
        return priority

    def on_remove(self, *, row: int, priority: int, evicted: bool) -> None:
        """Forgotten, but for the key of what was evicted on trial."""
        if self._is_main[row]:
            self._is_main[row] = 0
            self._num_main -= 1
        elif evicted:
            self._remember(self._blocks.key(row))
        above = self._blocks.parent(row) if evicted and self._hit_at[row] else None
        if above is not None and self._hit_at[above] == self._hit_at[row]:
            self._hits[above] = 0

    def section(self, row: int) -> int:
        """0: small; 1: main."""
        return self._is_main[row]

    def first_section(self) -> int:
        """The small queue, unless it is short."""
        num_held = len(self._blocks)
        return int(_SMALL_SHARE * (num_held - self._num_main) < num_held)

    def spare(self, *, row: int, priority: int) -> int | None:
        """One that was hit enough goes to the end of the main queue."""
        is_main, hits = self._is_main[row], self._hits[row]
        if hits < (1 if is_main else _HITS_TO_MOVE):
            return None
        if is_main:
            self._hits[row] = hits - 1
        else:
            self._move(row)
            self._hits[row] = 0
        self._last += 1
        return self._last

    def _move(self, row: int) -> None:
        """To the main queue, with its ancestors."""
        above: int | None = row
        while above is not None and not self._is_main[above]:
            self._is_main[above] = 1
            self._num_main += 1
            above = self._blocks.parent(above)

    def _remember(self, key: int) -> None:
        self._num_gone += 1
        self._gone[key] = self._num_gone
        longest = len(self._blocks)
        if len(self._gone) > longest + longest // 4 + _SLACK:
            oldest = self._num_gone - longest
            self._gone = {each: number for each, number in self._gone.items() if number > oldest}
