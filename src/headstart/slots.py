"""Room for blocks of several sizes within one fixed capacity: slabs, cut into slots on demand.

The capacity is divided into slabs of equal size. A slab without blocks belongs to nobody; the
first allocation of a slot size takes one and cuts it into slots of that size. A slab whose last
slot is freed belongs to nobody again. So a second model, with blocks of another size, gets room as
soon as whole slabs are emptied, and the capacity is never exceeded by a byte.

A slot is named by its byte offset in the capacity, which is all that arena and file tier need.
Pure bookkeeping, not thread-safe: `Index` holds the lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from headstart.errors import ConfigError
from headstart.units import PAGE_NBYTES, align_up


def default_slab_nbytes(capacity_nbytes: int) -> int:
    """A 16th of the capacity within [1 MiB, 1 GiB], but at most 256 slabs, in whole pages."""
    wanted = min(max(capacity_nbytes // 16, 1 << 20), 1 << 30)
    wanted = align_up(max(wanted, capacity_nbytes // 256))
    return min(wanted, capacity_nbytes // PAGE_NBYTES * PAGE_NBYTES)


class Slot(NamedTuple):
    """A reserved place: its byte offset in the tier and the generation to write there."""

    offset: int
    generation: int


@dataclass(slots=True)
class _Slab:
    slot_nbytes: int = 0  # 0: belongs to nobody
    num_used: int = 0
    num_cut: int = 0  # slots [0, num_cut) were handed out at least once
    freed: list[int] = field(default_factory=list)


class SlabPool:
    """Allocates slots. `slab_nbytes` bounds the size of a slot."""

    def __init__(self, *, capacity_nbytes: int, slab_nbytes: int) -> None:
        if not 0 < slab_nbytes <= capacity_nbytes or slab_nbytes % PAGE_NBYTES:
            # Off the page grid, slots would be too, and direct I/O refuses such memory.
            raise ConfigError(
                f"slab_nbytes={slab_nbytes} must be a multiple of {PAGE_NBYTES} "
                f"in [{PAGE_NBYTES}, capacity={capacity_nbytes}]"
            )
        self.slab_nbytes = slab_nbytes
        self.num_slabs = capacity_nbytes // slab_nbytes
        self.capacity_nbytes = self.num_slabs * slab_nbytes
        self.used_nbytes = 0
        self._slabs = [_Slab() for _ in range(self.num_slabs)]
        self._free_slabs = list(range(self.num_slabs - 1, -1, -1))
        self._open_slabs: dict[int, dict[int, None]] = {}  # slot size -> slabs with a free slot

    def allocate(self, slot_nbytes: int) -> int | None:
        """Offset of a free slot, or None when neither a slot nor a slab is free."""
        open_slabs = self._open_slabs.setdefault(slot_nbytes, {})
        if not open_slabs:
            if not self._free_slabs:
                return None
            self._assign(self._free_slabs.pop(), slot_nbytes)
        number = next(iter(open_slabs))
        slab = self._slabs[number]
        if slab.freed:
            slot = slab.freed.pop()
        else:
            slot = slab.num_cut
            slab.num_cut += 1
        slab.num_used += 1
        self.used_nbytes += slot_nbytes
        if slab.num_used == self.slab_nbytes // slot_nbytes:
            del open_slabs[number]
        return number * self.slab_nbytes + slot * slot_nbytes

    def free(self, offset: int) -> None:
        """Give a slot back."""
        number = offset // self.slab_nbytes
        slab = self._slabs[number]
        slab.freed.append(offset % self.slab_nbytes // slab.slot_nbytes)
        slab.num_used -= 1
        self.used_nbytes -= slab.slot_nbytes
        self._open_slabs[slab.slot_nbytes][number] = None
        if slab.num_used == 0:
            del self._open_slabs[slab.slot_nbytes][number]
            self._slabs[number] = _Slab()
            self._free_slabs.append(number)

    @property
    def num_used(self) -> int:
        """Slots handed out and not freed."""
        return sum(slab.num_used for slab in self._slabs)

    def slots_per_slab(self, slot_nbytes: int) -> int:
        """Number of slots of a size in one slab; 0 when it does not fit."""
        return self.slab_nbytes // slot_nbytes

    def slabs_of(self, slot_nbytes: int) -> list[int]:
        """Numbers of the slabs that are cut into slots of this size."""
        return [n for n, slab in enumerate(self._slabs) if slab.slot_nbytes == slot_nbytes]

    def adopt(self, offsets: np.ndarray, slot_nbytes: np.ndarray) -> None:
        """Fill an empty pool: slots at `offsets`, of `slot_nbytes` each, are in use."""
        if not len(offsets):
            return
        order = np.argsort(offsets)
        offsets, slot_nbytes = offsets[order].astype(np.int64), slot_nbytes[order]
        slabs = offsets // self.slab_nbytes
        starts = np.flatnonzero(np.append(True, slabs[1:] != slabs[:-1]))
        stops = np.append(starts[1:], len(offsets))
        for number, start, stop in zip(slabs[starts].tolist(), starts, stops, strict=True):
            size = int(slot_nbytes[start])
            slots = offsets[start:stop] % self.slab_nbytes // size
            self._assign(number, size)
            slab = self._slabs[number]
            slab.num_used = len(slots)
            slab.num_cut = int(slots[-1]) + 1
            if slab.num_cut > slab.num_used:
                slab.freed = np.setdiff1d(np.arange(slab.num_cut), slots)[::-1].tolist()
            self.used_nbytes += slab.num_used * size
            if slab.num_used == self.slots_per_slab(size):
                del self._open_slabs[size][number]
        self._free_slabs = [n for n in self._free_slabs if not self._slabs[n].slot_nbytes]

    def check_invariants(self) -> None:
        """Every slab is free or assigned, never both, and counts add up."""
        free = set(self._free_slabs)
        assert len(free) == len(self._free_slabs)
        for number, slab in enumerate(self._slabs):
            assert (slab.slot_nbytes == 0) == (number in free)
            if slab.slot_nbytes:
                num_slots = self.slots_per_slab(slab.slot_nbytes)
                assert 0 < slab.num_used <= slab.num_cut <= num_slots
                assert slab.num_cut - slab.num_used == len(set(slab.freed)) == len(slab.freed)
                is_open = number in self._open_slabs[slab.slot_nbytes]
                assert is_open == (slab.num_used < num_slots)
        assert self.used_nbytes == sum(s.num_used * s.slot_nbytes for s in self._slabs)
        assert self.used_nbytes <= self.capacity_nbytes

    def _assign(self, number: int, slot_nbytes: int) -> None:
        self._slabs[number] = _Slab(slot_nbytes=slot_nbytes)
        self._open_slabs.setdefault(slot_nbytes, {})[number] = None
