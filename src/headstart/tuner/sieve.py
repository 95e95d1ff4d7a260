"""SIEVE over leaves, only simulated: a queue in order of arrival, and a hand that goes through it.

A hit marks a block and moves nothing. The hand goes from the oldest to the newest and round again,
takes marks away, and evicts the first leaf without one, where it stays (Zhang et al., NSDI 2024).
What has children is passed over. The blocks of one request arrive last to first, so that the hand
comes to a child before its parent.
"""

from __future__ import annotations

from array import array

import numpy as np

from headstart.tuner.recorded import NO_PARENT, Advance, Ints, Recorded, each_request


def sieve_hits(recorded: Recorded, capacity_blocks: int, advance: Advance) -> Ints:
    """Blocks of each request that are hits."""
    cache = _Sieve(recorded.parent, capacity_blocks)
    found = np.zeros(len(recorded), np.int32)
    for number, blocks in each_request(recorded, advance):
        found[number] = cache.request(blocks)
    return found


_MAX_ENDS = 3
"""How often the hand passes the end: the rest of a round, one that takes marks away, one more."""


class _Sieve:
    """A ring of blocks through `_newer` and `_older`; its end stands between newest and oldest."""

    def __init__(self, parent: Ints, capacity: int) -> None:
        num_blocks = len(parent)
        self._parent = parent.tolist()
        self._free = capacity
        self._is_held = bytearray(num_blocks)
        self._is_marked = bytearray(num_blocks)
        self._num_children = array("i", bytes(4 * num_blocks))
        self._end = num_blocks
        self._newer = array("i", range(num_blocks + 1))
        self._older = array("i", range(num_blocks + 1))
        self._hand = self._end

    def request(self, blocks: list[int]) -> int:
        """Look up, use, and store the rest; returns the length of what was held."""
        held = 0
        while held < len(blocks) and self._is_held[blocks[held]]:
            self._is_marked[blocks[held]] = 1
            held += 1
        pinned = blocks[held - 1] if held else NO_PARENT
        while self._free < len(blocks) - held and self._evict(pinned):
            pass
        new = blocks[held : held + self._free]
        for block in reversed(new):
            self._add(block)
        return held

    def _add(self, block: int) -> None:
        newest = self._older[self._end]
        self._newer[newest], self._older[block] = block, newest
        self._newer[block], self._older[self._end] = self._end, block
        self._is_held[block], self._is_marked[block] = 1, 0
        self._free -= 1
        if self._parent[block] != NO_PARENT:
            self._num_children[self._parent[block]] += 1

    def _evict(self, pinned: int) -> bool:
        """Evict one; False where nothing may go."""
        hand, num_ends = self._hand, 0
        while num_ends <= _MAX_ENDS:
            if hand == self._end:
                num_ends += 1
            elif not self._num_children[hand] and hand != pinned:
                if not self._is_marked[hand]:
                    self._remove(hand)
                    return True
                self._is_marked[hand] = 0
            hand = self._newer[hand]
        return False

    def _remove(self, block: int) -> None:
        newer, older = self._newer[block], self._older[block]
        self._newer[older], self._older[newer] = newer, older
        self._hand = newer
        self._is_held[block] = 0
        self._free += 1
        if self._parent[block] != NO_PARENT:
            self._num_children[self._parent[block]] -= 1
