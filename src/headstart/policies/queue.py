"""Leaves in order of priority: a heap that tolerates stale entries.

An entry is one int, `priority << 32 | row`, so that a million leaves cost 56 MB at most. Entries
are corrected when they surface: one whose row is no longer a candidate is thrown away, one whose
priority has risen is put back. A row has at most one entry. Priorities only rise, which keeps the
order exact; so a row that is to come back with a lower one, for another block, is forgotten first,
and its old entry lies in the heap until it surfaces, or until half of the heap is such entries.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_MOST_FORGOTTEN = 1024


class LeafQueue:
    """Candidates for eviction of one slot size, coldest first. Not thread-safe."""

    def __init__(self, current: Callable[[int], int | None]) -> None:
        """`current(row)` is the row's priority now, or None when it is no candidate any more."""
        self._heap: list[int] = []
        self._queued = bytearray()  # 1 at each row that has an entry, forgotten ones not counted
        self._num_forgotten = 0  # since they were last cleared away
        self._current = current

    def __len__(self) -> int:
        """Entries held, stale ones included."""
        return len(self._heap)

    def __contains__(self, row: int) -> bool:
        """Whether `row` has an entry."""
        return row < len(self._queued) and self._queued[row] == 1

    def offer(self, row: int, priority: int) -> None:
        """`row` has become a candidate."""
        if row >= len(self._queued):
            self._queued.extend(bytes(row + 1024 - len(self._queued)))
        if not self._queued[row]:
            self._queued[row] = 1
            heapq.heappush(self._heap, priority << _ROW_BITS | row)

    def forget(self, row: int) -> None:
        """`row` is no candidate any more; when it is one again, it may have any priority."""
        if row not in self:
            return
        self._queued[row] = 0
        self._num_forgotten += 1
        if self._num_forgotten > max(_MOST_FORGOTTEN, len(self._heap) // 2):
            self._num_forgotten = 0
            lowest: dict[int, int] = {}
            for entry in sorted(self._heap):  # of a row's entries the lowest is no higher than it
                if self._queued[entry & _ROW_MASK]:
                    lowest.setdefault(entry & _ROW_MASK, entry)
            self._heap = list(lowest.values())

    def load(self, priorities: np.ndarray, rows: np.ndarray) -> None:
        """Fill an empty queue: row `rows[i]` is a candidate of priority `priorities[i]`."""
        if len(rows) and int(priorities.max()) >> (64 - _ROW_BITS):  # needs more than 64 bits
            pairs = zip(priorities.tolist(), rows.tolist(), strict=True)
            self._heap = sorted(priority << _ROW_BITS | row for priority, row in pairs)
        else:
            entries = priorities.astype(np.uint64) << np.uint64(_ROW_BITS) | rows.astype(np.uint64)
            self._heap = np.sort(entries).tolist()  # ascending, so a heap as it stands
        queued = np.zeros(int(rows.max(initial=-1)) + 1, np.uint8)
        queued[rows] = 1
        self._queued = bytearray(queued)

    def coldest(self) -> tuple[int, int] | None:
        """(priority, row) of the coldest candidate, which stays queued; None when there is none."""
        heap = self._heap
        while heap:
            entry = heap[0]
            row = entry & _ROW_MASK
            priority = self._current(row)
            if priority is None:
                heapq.heappop(heap)
                self._queued[row] = 0
            elif priority << _ROW_BITS | row != entry:
                heapq.heapreplace(heap, priority << _ROW_BITS | row)
            else:
                return priority, row
        return None
