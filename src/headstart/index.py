r"""The index of a tier: from key to place, what may be evicted, and what is pinned.

Each row is one held block. Rows form a forest: a block's parent is the block before it in its
prompt. Every change keeps these invariants, which `check_invariants` states again as code:

- *Prefixes are closed.* A row's parent is held; a row goes only when it has no children, or
  together with all of its descendants. So the held part of any prompt is a prefix of it.
- *A slot has one owner*: free (`SlabPool`), reserved by a writer, or a row's.
- *A pinned row keeps its slot.* Discarding it only makes it doomed: no look-up finds it any more,
  and its slot is freed with the last pin. Nobody's memory or disk range is recycled under a reader.
- A row is a candidate for eviction when it has neither children nor pins.

    reserve ----> slot (reserved) ----> publish ----> row ----> evict, discard, drop ----> free
                       \---- release ----> free             \---- (pinned: doomed until unpin)

All methods are thread-safe. `lookup` takes no lock, so that a look-up never waits for an eviction.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headstart.blocks import HeldBlocks, finder
from headstart.keytable import KeyTable
from headstart.policies import EvictionPolicy, Expiring, Watching
from headstart.policies.base import as_clocks
from headstart.room import Room
from headstart.rows import NO_PARENT, PACK_RECORD, Rows, by_value
from headstart.slots import SlabPool, Slot
from headstart.types import BlockKey

_SLICE_ROWS = 4096
_BOOT_BITS = 32  # generation = random number of this start << 32 | counter


@dataclass(slots=True)
class IndexCounters:
    """Blocks since the index was made."""

    num_stored: int = 0
    num_evicted: int = 0
    num_discarded: int = 0
    num_dropped: int = 0


class Index:
    """Rows, their tree, their slots and their order of eviction."""

    def __init__(
        self,
        *,
        capacity_nbytes: int,
        slab_nbytes: int,
        policy: EvictionPolicy,
        slot_nbytes: Callable[[int], int],
        logged: bool = False,
    ) -> None:
        """`slot_nbytes(block_nbytes)` is the room a block takes; `logged` fills `take_log()`."""
        self.counters = IndexCounters()
        self.rows = Rows()
        self.slots = SlabPool(capacity_nbytes=capacity_nbytes, slab_nbytes=slab_nbytes)
        self.block_tokens: dict[int, int] = {}  # by number of namespace, for policies that ask
        self._slot_nbytes = slot_nbytes
        self._room = Room(self.rows, self.slots, slot_nbytes, policy)
        self._table = KeyTable()
        self._policy = policy
        self._is_gone = policy.is_gone if isinstance(policy, Expiring) else None
        self._find = finder(self._table, self._is_gone)
        if isinstance(policy, Watching):
            policy.watch(HeldBlocks(self.rows, self._table, self.block_tokens))
        self._doomed: set[int] = set()
        self._reserved: dict[int, int] = {}  # offset -> slot size
        self._clock = 1
        self._generation = secrets.randbits(32) << _BOOT_BITS
        self._log: bytearray | None = bytearray() if logged else None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the index holds, queues estimated at 56 bytes an entry."""
        return self._table.nbytes + self.rows.nbytes + 56 * len(self._room)

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Length of the prefix of `keys` that is held. Lock-free, so a hint: `pin` decides.

        Binary search, because the held part of a chain is a prefix of it.
        """
        find = self._find
        if not keys or find(keys[0]) is None:
            return 0
        if find(keys[-1]) is not None:
            return len(keys)
        held, absent = 0, len(keys) - 1
        while absent - held > 1:
            middle = (held + absent) // 2
            if find(keys[middle]) is None:
                absent = middle
            else:
                held = middle
        return absent

    def pin(
        self, keys: Sequence[BlockKey], *, namespace: int, block_nbytes: int, is_use: bool = True
    ) -> list[int]:
        """Rows of the prefix of `keys` that is held, each pinned once more.

        Counts as a use of them unless `is_use` is false. A row of another namespace or block size
        ends the prefix, whatever its key says.
        """
        rows = self.rows
        pinned: list[int] = []
        with self._lock:
            self._clock += 1
            for key in keys:
                row = self._find(key)
                if (
                    row is None
                    or rows.namespace[row] != namespace
                    or rows.block_nbytes[row] != block_nbytes
                ):
                    break
                rows.pins[row] += 1
                if is_use:
                    self._hit(row)
                pinned.append(row)
        return pinned

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Count a use of the prefix of `keys` that is held."""
        with self._lock:
            self._clock += 1
            for key in keys:
                row = self._find(key)
                if row is None:
                    break
                self._hit(row)

    def unpin(self, pinned: Sequence[int], *, damaged: Sequence[int] = ()) -> None:
        """Undo one pin of each row. Rows in `damaged` are dropped with all their descendants."""
        with self._lock:
            if damaged:
                live = [row for row in damaged if row not in self._doomed]
                self.counters.num_dropped += self._remove_with_descendants(live)
            for row in pinned:
                self.rows.pins[row] -= 1
                if self.rows.pins[row] == 0:
                    if row in self._doomed:
                        self._doomed.remove(row)
                        self._free_row(row)
                    else:
                        self._room.offer(row)

    def reserve(self, block_nbytes: int, count: int) -> list[Slot]:
        """Up to `count` slots for blocks of a size; evicts for room. Fewer when all is pinned."""
        slot_nbytes = self._slot_nbytes(block_nbytes)
        if slot_nbytes > self.slots.slab_nbytes:
            return []
        reserved: list[Slot] = []
        with self._lock:
            while len(reserved) < count:
                offset = self.slots.allocate(slot_nbytes)
                if offset is None:
                    if not self._make_room(slot_nbytes):
                        break
                    continue
                self._generation += 1
                self._reserved[offset] = slot_nbytes
                reserved.append(Slot(offset, self._generation))
        return reserved

    def release(self, slots: Sequence[Slot]) -> None:
        """Give back reserved slots that will not be published."""
        with self._lock:
            for slot in slots:
                self._free_reserved(slot.offset)

    def publish(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[Slot | None],
        *,
        parent: BlockKey | None,
        namespace: int,
        block_nbytes: int,
        pin: bool = False,
    ) -> list[int | None]:
        """Make the blocks of a chain findable: the row of each, None where it was refused.

        `slots[i]` holds block i, or is None when block i was not written. A block that is held
        already keeps its row and the new slot is freed; a block whose parent is not held is
        refused and its slot freed. `pin` pins every row that is returned.
        """
        outcome: list[int | None] = []
        with self._lock:
            self._clock += 1
            above = None if parent is None else self._table.find(parent)
            rooted = parent is None or above is not None
            for key, slot in zip(keys, slots, strict=True):
                row = self._table.find(key)
                if row is not None and (
                    self.rows.namespace[row] != namespace
                    or self.rows.block_nbytes[row] != block_nbytes
                ):
                    row, rooted = None, False  # a forged key: another block stands there
                elif row is not None and self._is_gone is not None and self._is_gone(row):
                    self._hit(row)  # it was gone, and is back
                if row is not None or slot is None or not rooted:
                    if slot is not None:
                        self._free_reserved(slot.offset)
                else:
                    row = self._insert(key, slot, above, namespace, block_nbytes)
                if row is not None and pin:
                    self.rows.pins[row] += 1
                rooted, above = row is not None, row
                outcome.append(row)
            # Offered only now: within the loop every new row but the last gets a child.
            for row in outcome:
                if row is not None:
                    self._room.offer(row)
        return outcome

    def discard(self, keys: Sequence[BlockKey]) -> int:
        """Forget blocks and all their descendants; pinned ones keep their slot until unpinned."""
        with self._lock:
            found = [row for row in map(self._table.find, keys) if row is not None]
            count = self._remove_with_descendants(found)
            self.counters.num_discarded += count
        return count

    def discard_namespace(self, namespace: int) -> int:
        """Forget every block of a namespace, a slice at a time: others wait for one slice only."""
        total = 0
        while True:
            with self._lock:
                live = self._live_rows()
                found = live[self.rows.column("namespace")[live] == namespace][:_SLICE_ROWS]
                count = self._remove_with_descendants(found.tolist())
                self.counters.num_discarded += count
            total += count
            if len(found) < _SLICE_ROWS:  # all there were; others may store more meanwhile
                return total

    @property
    def usage(self) -> dict[int, int]:
        """Bytes of blocks held, by number of namespace. Visits every row."""
        with self._lock:
            return self.rows.usage(self._live_rows())

    def take_log(self) -> bytes:
        """Records (dtype RECORD) of all changes since the last call, in order; empties the log."""
        with self._lock:
            assert self._log is not None, "this index keeps no log"
            log, self._log = self._log, bytearray()
        return bytes(log)

    def held(self, at_most: int | None = None) -> np.ndarray:
        """Records (dtype RECORD) of all held blocks, or of at most so many, chosen at random."""
        with self._lock:
            records = self.rows.records(self._live_rows(at_most))
            records["key"] = self._table.keys()[records["row"]]
            records["priority"] = as_clocks(records["priority"], self._clock)
            # What comes now comes after all these, in the log, too.
            self._clock = max(self._clock, int(records["priority"].max(initial=0)))
        return records

    def restore(self, records: np.ndarray) -> None:
        """Fill an empty index from records, one a row, checked by `journal.restorable` before."""
        with self._lock:
            assert not len(self), "restore needs an empty index"
            self.rows.load(records)
            numbers = records["row"].astype(np.int64)
            self._table.load(records["key"], numbers, num_rows=len(self.rows))
            self._clock = int(records["priority"].max(initial=0)) + 1
            slots_of = by_value(records["block_nbytes"], self._slot_nbytes)
            self.slots.adopt(records["offset"], slots_of)
            leaf = self.rows.column("num_children")[numbers] == 0
            self._room.load(numbers[leaf], slots_of[leaf])

    def check_invariants(self) -> None:
        """Assert everything the module docstring promises. For tests: visits every row."""
        with self._lock:
            rows = self.rows
            live = self._live_rows().tolist()
            assert len(live) == len(self._table) and len(live) + len(self._doomed) == rows.num_used
            children = [0] * len(rows)
            for row in live:
                assert self._table.find(self._table.key(row)) == row
                if rows.parent[row] != NO_PARENT:
                    assert (
                        rows.block_nbytes[rows.parent[row]] and rows.parent[row] not in self._doomed
                    )
                    children[rows.parent[row]] += 1
            assert all(rows.num_children[row] == children[row] for row in live)
            assert all(rows.pins[row] > 0 for row in self._doomed)
            owned = [rows.offset[row] for row in [*live, *self._doomed]] + list(self._reserved)
            assert len(owned) == len(set(owned)), "a slot has two owners"
            self.slots.check_invariants()
            assert self.slots.num_used == len(owned)
            for row in live:
                if rows.num_children[row] == 0 and rows.pins[row] == 0:
                    assert row in self._room

    # -- under the lock -------------------------------------------------------------------------

    def _hit(self, row: int) -> None:
        priority = self.rows.priority
        priority[row] = self._policy.on_hit(row=row, priority=priority[row], clock=self._clock)

    def _insert(
        self, key: BlockKey, slot: Slot, above: int | None, namespace: int, block_nbytes: int
    ) -> int:
        rows = self.rows
        row = rows.take()
        self._table.grow(len(rows))
        rows.parent[row] = NO_PARENT if above is None else above
        rows.namespace[row] = namespace
        rows.block_nbytes[row] = block_nbytes
        rows.offset[row] = slot.offset
        rows.generation[row] = slot.generation
        if above is not None:
            rows.num_children[above] += 1
        del self._reserved[slot.offset]
        self._table.insert(key, row)
        rows.priority[row] = self._policy.on_insert(row=row, clock=self._clock)
        self.counters.num_stored += 1
        if self._log is not None:
            self._log += PACK_RECORD.pack(
                row, rows.parent[row], namespace, block_nbytes, *slot, self._clock, key
            )
        return row

    def _make_room(self, slot_nbytes: int) -> bool:
        """Evict for one more slot of a size; False when nothing may go."""
        room = self._room
        if room.is_time_for_slabs(slot_nbytes):
            in_use = [*self._reserved, *(self.rows.offset[row] for row in self._doomed)]
            slab = room.colder_slab(slot_nbytes, live=self._live_rows(), in_use=in_use)
            if slab is not None:
                self.counters.num_evicted += self._remove_with_descendants(slab.tolist())
                return True
        leaf = room.coldest_leaf(slot_nbytes)
        if leaf is None:
            return False
        self._remove([leaf], evicted=True)
        self.counters.num_evicted += 1
        return True

    def _live_rows(self, at_most: int | None = None) -> np.ndarray:
        live = self.rows.some(at_most)
        return live[~np.isin(live, list(self._doomed))] if self._doomed else live

    def _remove_with_descendants(self, found: Sequence[int]) -> int:
        """Remove rows and all rows below them; returns how many. Leaves need no search."""
        if any(self.rows.num_children[row] for row in found):
            found = self.rows.with_descendants(found)
        leaving = list(dict.fromkeys(found))
        self._remove(leaving)
        return len(leaving)

    def _remove(self, leaving: Sequence[int], *, evicted: bool = False) -> None:
        """Remove rows whose children, if any, leave with them."""
        rows, table = self.rows, self._table
        self._room.leave(leaving, evicted=evicted)
        gone = set(leaving)
        for row in leaving:
            table.remove(table.key(row), row)
            if self._log is not None:
                self._log += PACK_RECORD.pack(row, NO_PARENT, 0, 0, 0, 0, 0, bytes(32))
            above = rows.parent[row]
            if above != NO_PARENT and above not in gone:
                rows.num_children[above] -= 1
                self._room.offer(above)
        for row in leaving:
            if rows.pins[row]:
                rows.parent[row] = NO_PARENT
                rows.num_children[row] = 0
                self._doomed.add(row)
            else:
                self._free_row(row)

    def _free_row(self, row: int) -> None:
        self.slots.free(self.rows.offset[row])
        self.rows.give_back(row)

    def _free_reserved(self, offset: int) -> None:
        del self._reserved[offset]
        self.slots.free(offset)
