"""Least frequently used, with dynamic ageing."""

from __future__ import annotations

from headstart.policies.base import CLOCK_BITS, Blocks, pack
from headstart.policies.byrow import ByRow

_MOST_USES = (1 << 16) - 1


class LfuDaPolicy:
    """Evicts the leaf with the fewest uses, where uses of long ago count less and less.

    The key of a block is its number of uses since it was stored, and the key of the last leaf
    evicted before its last use: what comes now starts where the coldest has got to, so that what
    was popular once is overtaken (Arlitt et al. 1999). Of equal keys the older use goes.

    A restart keeps the order, not the numbers: all that is there then has been used once. Keys rise
    by about one each time the whole tier is replaced, and stop after 33 million: it is `lru` then.
    """

    name = "lfu-da"

    def __init__(self) -> None:
        self._age = 0
        self._uses = ByRow("H", 1)

    def watch(self, blocks: Blocks) -> None:
        """Nothing to ask."""

    def on_insert(self, *, row: int, clock: int) -> int:
        """Used once, now."""
        self._uses[row] = 1
        return pack(self._age + 1, clock)

    def on_hit(self, *, row: int, priority: int, clock: int) -> int:
        """Used once more, now."""
        uses = self._uses[row] = min(self._uses[row] + 1, _MOST_USES)
        return pack(self._age + uses, clock)

    def on_remove(self, *, row: int, priority: int, evicted: bool) -> None:
        """The coldest is what the next ones start from; others say nothing of age."""
        if evicted:
            self._age = max(self._age, priority >> CLOCK_BITS)
