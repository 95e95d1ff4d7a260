"""Who goes when a tier is full: the coldest leaf of a size, or the coldest slab of another size.

Blocks of one slot size compete by their policy, through a queue of leaves. Sizes compete slab by
slab, and by the clocks in their priorities alone: when the coldest block of a size is younger than
a whole slab of another size (by their mean), that slab is emptied, so that a second model gets room
on a full tier and a hot one keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from headstart.policies import EvictionPolicy, Leaves, Watching, leaf_queue
from headstart.policies.base import CLOCK_MASK
from headstart.rows import Rows
from headstart.slots import SlabPool


class Room:
    """Chooses victims among the rows of an index. Not thread-safe; removes nothing itself."""

    def __init__(
        self,
        rows: Rows,
        slots: SlabPool,
        slot_nbytes: Callable[[int], int],
        policy: EvictionPolicy,
    ) -> None:
        self._rows, self._slots, self._slot_nbytes = rows, slots, slot_nbytes
        self._policy = policy
        self._watching = policy if isinstance(policy, Watching) else None
        self._queues: dict[int, Leaves] = {}
        self._patience: dict[int, int] = {}

    def __len__(self) -> int:
        """Entries of all queues."""
        return sum(map(len, self._queues.values()))

    def __contains__(self, row: int) -> bool:
        """Whether a held row is queued for eviction."""
        return row in self._queue(self._size(row))

    def offer(self, row: int) -> None:
        """A held row may have become a candidate: one without children and pins."""
        if self._rows.num_children[row] == 0 and self._rows.pins[row] == 0:
            self._queue(self._size(row)).offer(row, self._rows.priority[row])

    def leave(self, leaving: Sequence[int], *, evicted: bool) -> None:
        """Held rows that are removed next: as the coldest leaf, if `evicted`, or for a reason."""
        watching = self._watching
        if watching is None:
            return  # priorities are clocks then, and rise from one block of a row to the next, too
        for row in leaving:
            watching.on_remove(row=row, priority=self._rows.priority[row], evicted=evicted)
            if not evicted:
                self._queue(self._size(row)).forget(row)

    def load(self, leaves: np.ndarray, slots_of: np.ndarray) -> None:
        """Fill empty queues: `leaves[i]`, a row, is a candidate of slot size `slots_of[i]`."""
        priorities = self._rows.column("priority")
        for slot_nbytes in np.unique(slots_of).tolist():
            chosen = leaves[slots_of == slot_nbytes]
            self._queue(slot_nbytes).load(priorities[chosen], chosen)

    def coldest_leaf(self, slot_nbytes: int) -> int | None:
        """The next row to evict among those of a slot size; None when there is no candidate."""
        coldest = self._queue(slot_nbytes).coldest()
        return None if coldest is None else coldest[1]

    def colder_slab(
        self, slot_nbytes: int, *, live: np.ndarray, in_use: Iterable[int]
    ) -> np.ndarray | None:
        """Rows of the slab of another size that should go before any block of this size.

        None when no slab is colder than the coldest leaf. `live` are all rows that may go; slabs
        with a pinned row, or a slot at an offset `in_use`, stay.
        """
        if not self._queues.keys() - {slot_nbytes}:
            return None
        rows, slots = self._rows, self._slots
        slab = (rows.column("offset")[live] // np.uint64(slots.slab_nbytes)).astype(np.int64)
        count = np.bincount(slab, minlength=slots.num_slabs)
        clocks = rows.column("priority")[live] & np.uint64(CLOCK_MASK)
        warmth = np.bincount(slab, clocks, slots.num_slabs)
        heat = warmth / np.maximum(count, 1)
        stays = np.bincount(slab, rows.column("pins")[live] > 0, slots.num_slabs) > 0
        stays |= count == 0
        stays[[offset // slots.slab_nbytes for offset in in_use]] = True
        stays[slots.slabs_of(slot_nbytes)] = True
        heat[stays] = np.inf
        coldest = int(heat.argmin())
        own = self._queue(slot_nbytes).coldest()
        if heat[coldest] >= (np.inf if own is None else own[0] & CLOCK_MASK):
            return None
        chosen: np.ndarray = live[slab == coldest]
        return chosen

    def is_time_for_slabs(self, slot_nbytes: int) -> bool:
        """Whether to look for a colder slab, which scans all rows, before evicting a leaf.

        Always when there is no leaf of this size, else once every slab's worth of evictions.
        """
        patience = self._patience.get(slot_nbytes, 0)
        if patience > 0 and self.coldest_leaf(slot_nbytes) is not None:
            self._patience[slot_nbytes] = patience - 1
            return False
        self._patience[slot_nbytes] = self._slots.slots_per_slab(slot_nbytes)
        return True

    def _size(self, row: int) -> int:
        return self._slot_nbytes(self._rows.block_nbytes[row])

    def _queue(self, slot_nbytes: int) -> Leaves:
        if slot_nbytes not in self._queues:
            self._queues[slot_nbytes] = leaf_queue(
                self._policy, lambda row: self._candidate(slot_nbytes, row), self._raise_to
            )
        return self._queues[slot_nbytes]

    def _raise_to(self, row: int, priority: int) -> None:
        self._rows.priority[row] = priority

    def _candidate(self, slot_nbytes: int, row: int) -> int | None:
        """The priority of a row that may be evicted from the queue of a size, else None."""
        rows = self._rows
        if (
            rows.block_nbytes[row] == 0
            or rows.num_children[row]
            or rows.pins[row]
            or self._size(row) != slot_nbytes
        ):
            return None
        return int(rows.priority[row])
