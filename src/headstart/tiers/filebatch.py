"""Reading and writing runs of blocks of a file tier: the `Batch` objects of `FileTier`.

Blocks that lie one after another on the medium, as those of a prompt stored in one go do, move in
one call of up to `COALESCE_NBYTES`: at 128 KiB a call a block, the calls would cost more than the
bytes. Each block keeps its own header and its own verdict.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headstart.blockfile import HEADER_NBYTES, Damage, encode_header, inspect_block, slot_nbytes
from headstart.slots import Slot
from headstart.types import KeyChain, Outcome
from headstart.units import align_up

if TYPE_CHECKING:
    from headstart.tiers.file import FileTier

_log = logging.getLogger(__name__)
COALESCE_NBYTES = 2112 << 10  # two blocks of 1 MiB with their headers
_SCRATCH = threading.local()


def _header_pages(count: int) -> list[memoryview]:
    """This thread's pages for headers, aligned for direct I/O."""
    pages: list[memoryview] = getattr(_SCRATCH, "pages", [])
    if len(pages) < count:
        memory = memoryview(mmap.mmap(-1, count * HEADER_NBYTES))
        pages = [memory[n * HEADER_NBYTES : (n + 1) * HEADER_NBYTES] for n in range(count)]
        _SCRATCH.pages = pages
    return pages[:count]


def _runs(offsets: Sequence[int], nbytes: int, slab_nbytes: int) -> list[range]:
    """Indices of `offsets` in runs that one call can move: adjacent, in one slab, not too long."""
    longest = max(1, COALESCE_NBYTES // nbytes)
    runs: list[range] = []
    start = 0
    for index in range(1, len(offsets) + 1):
        if (
            index == len(offsets)
            or index - start == longest
            or offsets[index] != offsets[index - 1] + nbytes
            or offsets[index] // slab_nbytes != offsets[start] // slab_nbytes
        ):
            runs.append(range(start, index))
            start = index
    return runs


class ReadBatch:
    """A `Batch` that reads. Rows are pinned from here to `finish`."""

    def __init__(
        self,
        tier: FileTier,
        chain: KeyChain,
        targets: Sequence[memoryview],
        *,
        is_use: bool = True,
    ) -> None:
        """Without `is_use` it counts neither as hit or miss nor for the order of eviction."""
        check_memory(chain, targets)
        self._is_use = is_use
        self._tier, self._chain, self._targets = tier, chain, targets
        self._slot_nbytes = slot_nbytes(chain.block_nbytes)
        self._rows = tier.index.pin(
            chain.keys,
            namespace=tier.namespaces[chain.namespace],
            block_nbytes=chain.block_nbytes,
            is_use=is_use,
        )
        columns = tier.index.rows
        self._offsets = [columns.offset[row] for row in self._rows]
        self._generations = [columns.generation[row] for row in self._rows]
        self._runs = _runs(self._offsets, self._slot_nbytes, tier.index.slots.slab_nbytes)
        self._outcomes = [Outcome.MISS] * len(chain)
        self._damage: list[Damage] = []
        self._ready = 0

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def item_nbytes(self) -> int:
        """See `Batch.item_nbytes`."""
        return self._slot_nbytes * max(map(len, self._runs), default=0)

    def run(self, index: int) -> None:
        """See `Batch.run`."""
        run = self._runs[index]
        if not self._read(run) and len(run) > 1:
            for number in run:  # one bad sector must not cost its neighbours
                self._read(range(number, number + 1))

    def ready_blocks(self) -> int:
        """See `Batch.ready_blocks`."""
        while self._ready < len(self._rows) and self._outcomes[self._ready] is Outcome.DONE:
            self._ready += 1
        return self._ready

    def finish(self) -> list[Outcome]:
        """See `Batch.finish`."""
        tier, outcomes = self._tier, self._outcomes
        damaged = [
            row for row, o in zip(self._rows, outcomes, strict=False) if o is Outcome.DROPPED
        ]
        tier.index.unpin(self._rows, damaged=damaged)
        if damaged:
            tier.counters.add_damage(self._damage)
            tier.commit()
        done = outcomes.count(Outcome.DONE)
        if self._is_use:
            tier.counters.add(num_hits=done, num_misses=len(outcomes) - done)
        tier.counters.add(
            num_failed=outcomes.count(Outcome.FAILED), read_nbytes=done * self._slot_nbytes
        )
        return outcomes

    def _read(self, run: range) -> bool:
        """Read a run by one call and judge its blocks; False when the medium refused."""
        payload_nbytes = self._slot_nbytes - HEADER_NBYTES
        headers = _header_pages(len(run))
        buffers: list[memoryview] = []
        for header, number in zip(headers, run, strict=True):
            buffers += (header, self._targets[number][:payload_nbytes])
        try:
            count = self._tier.volume.read(self._offsets[run.start], buffers)
        except OSError as error:
            _log.warning("%d blocks cannot be read: %s", len(run), error)
            for number in run:
                self._outcomes[number] = Outcome.FAILED
            return False
        whole = count // self._slot_nbytes
        for place, (header, number) in enumerate(zip(headers, run, strict=True)):
            damage = self._inspect(header, number) if place < whole else Damage.TORN
            if damage is not None:
                self._damage.append(damage)
            self._outcomes[number] = Outcome.DONE if damage is None else Outcome.DROPPED
        return True

    def _inspect(self, header: memoryview, number: int) -> Damage | None:
        chain = self._chain
        return inspect_block(
            header,
            self._targets[number][: chain.block_nbytes],
            key=chain.keys[number],
            namespace=chain.namespace,
            generation=self._generations[number],
        )


class WriteBatch:
    """A `Batch` that writes what is not held yet. The block above the first one is pinned."""

    def __init__(
        self, tier: FileTier, chain: KeyChain, sources: Sequence[memoryview], namespace: int
    ) -> None:
        check_memory(chain, sources)
        self._tier, self._chain, self._sources, self._namespace = tier, chain, sources, namespace
        self._slot_nbytes = slot_nbytes(chain.block_nbytes)
        index = tier.index
        self._num_held = index.lookup(chain.keys)
        above = chain.keys[self._num_held - 1] if self._num_held else chain.parent
        self._pinned = index.pin(
            () if above is None else (above,),
            namespace=namespace,
            block_nbytes=chain.block_nbytes,
            is_use=False,
        )
        self._orphan = above is not None and not self._pinned
        wanted = 0 if self._orphan else len(chain) - self._num_held
        self._slots: list[Slot] = index.reserve(chain.block_nbytes, wanted)
        offsets = [slot.offset for slot in self._slots]
        self._runs = _runs(offsets, self._slot_nbytes, index.slots.slab_nbytes)
        self._outcomes = [Outcome.MISS] * len(self._slots)  # of writing, not yet of publishing
        self._ready = 0

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def item_nbytes(self) -> int:
        """See `Batch.item_nbytes`."""
        return self._slot_nbytes * max(map(len, self._runs), default=0)

    def run(self, index: int) -> None:
        """See `Batch.run`."""
        run = self._runs[index]
        headers = _header_pages(len(run))
        buffers: list[memoryview] = []
        for header, number in zip(headers, run, strict=True):
            self._head(header, number)
            source = self._sources[self._num_held + number]
            buffers += (header, source[: self._slot_nbytes - HEADER_NBYTES])
        whole = 0
        try:
            whole = (
                self._tier.volume.write(self._slots[run.start].offset, buffers) // self._slot_nbytes
            )
        except OSError as error:
            _log.warning("%d blocks cannot be written: %s", len(run), error)
        for place, number in enumerate(run):
            self._outcomes[number] = Outcome.DONE if place < whole else Outcome.FAILED

    def ready_blocks(self) -> int:
        """See `Batch.ready_blocks`."""
        while self._ready < len(self._slots) and self._outcomes[self._ready] is Outcome.DONE:
            self._ready += 1
        return self._num_held + self._ready

    def finish(self) -> list[Outcome]:
        """See `Batch.finish`."""
        tier, chain, held = self._tier, self._chain, self._num_held
        index, writing = tier.index, self._outcomes
        slots = [
            slot if outcome is Outcome.DONE else None
            for slot, outcome in zip(self._slots, writing, strict=True)
        ]
        index.release([s for s, kept in zip(self._slots, slots, strict=True) if kept is None])
        rows = index.publish(
            chain.keys[held : held + len(slots)],
            slots,
            parent=chain.keys[held - 1] if held else chain.parent,
            namespace=self._namespace,
            block_nbytes=chain.block_nbytes,
        )
        index.unpin(self._pinned)
        tier.commit()
        outcomes = [Outcome.DONE] * held
        for row, outcome in zip(rows, writing, strict=True):
            lost = Outcome.ORPHAN if outcome is Outcome.DONE else outcome
            outcomes.append(Outcome.DONE if row is not None else lost)
        rest = Outcome.ORPHAN if self._orphan else Outcome.FULL
        outcomes += [rest] * (len(chain) - len(outcomes))
        tier.counters.add(
            num_refused=outcomes.count(Outcome.FULL) + outcomes.count(Outcome.ORPHAN),
            num_failed=writing.count(Outcome.FAILED),
            written_nbytes=writing.count(Outcome.DONE) * self._slot_nbytes,
        )
        return outcomes

    def _head(self, header: memoryview, number: int) -> None:
        chain, place = self._chain, self._num_held + number
        encode_header(
            header,
            self._sources[place][: chain.block_nbytes],
            key=chain.keys[place],
            parent=chain.keys[place - 1] if place else chain.parent,
            namespace=chain.namespace,
            generation=self._slots[number].generation,
        )


def check_memory(chain: KeyChain, memory: Sequence[memoryview]) -> None:
    """Raise ValueError unless there is one large enough buffer a block."""
    if len(memory) != len(chain):
        raise ValueError(f"{len(chain)} blocks need as many buffers, not {len(memory)}")
    needed = align_up(chain.block_nbytes)
    if any(len(view) < needed for view in memory):
        raise ValueError(f"every buffer must be at least {needed} bytes long")
