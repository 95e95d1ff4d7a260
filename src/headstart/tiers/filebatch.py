"""Reading and writing runs of blocks of a file tier: the `Batch` objects of `FileTier`."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headstart.blockfile import HEADER_NBYTES, Damage, encode_header, inspect_block, slot_nbytes
from headstart.index import Slot
from headstart.types import KeyChain, Outcome
from headstart.units import align_up

if TYPE_CHECKING:
    from headstart.tiers.file import FileTier

_log = logging.getLogger(__name__)
_SCRATCH = threading.local()


def _header_page() -> memoryview:
    """This thread's page for a header, aligned for direct I/O."""
    page: memoryview | None = getattr(_SCRATCH, "page", None)
    if page is None:
        page = _SCRATCH.page = memoryview(mmap.mmap(-1, HEADER_NBYTES))
    return page


class ReadBatch:
    """A `Batch` that reads. Rows are pinned from here to `finish`."""

    def __init__(self, tier: FileTier, chain: KeyChain, targets: Sequence[memoryview]) -> None:
        check_memory(chain, targets)
        tier.namespaces[chain.namespace]  # refuses one that is not open
        self.item_nbytes = slot_nbytes(chain.block_nbytes)
        self._tier, self._chain, self._targets = tier, chain, targets
        self._rows = tier.index.pin(chain.keys)
        rows = tier.index.rows
        self._places = [(rows.offset[row], rows.generation[row]) for row in self._rows]
        self._outcomes = [Outcome.MISS] * len(chain)
        self._ready = 0

    def __len__(self) -> int:
        return len(self._rows)

    def run(self, index: int) -> None:
        """See `Batch.run`."""
        chain = self._chain
        offset, generation = self._places[index]
        header, target = _header_page(), self._targets[index]
        payload_nbytes = self.item_nbytes - HEADER_NBYTES
        try:
            count = self._tier.volume.read(offset, [header, target[:payload_nbytes]])
        except OSError as error:
            _log.warning("a block cannot be read: %s", error)
            self._outcomes[index] = Outcome.FAILED
            return
        damage: Damage | None = Damage.TORN
        if count == self.item_nbytes:
            damage = inspect_block(
                header,
                target[: chain.block_nbytes],
                key=chain.keys[index],
                namespace=chain.namespace,
                generation=generation,
            )
        if damage is None:
            self._outcomes[index] = Outcome.DONE
        else:
            self._outcomes[index] = Outcome.DROPPED
            self._tier.damage[damage] += 1

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
            tier.commit()
        done = outcomes.count(Outcome.DONE)
        tier.counters.add(
            num_hits=done,
            num_misses=len(outcomes) - done,
            num_failed=outcomes.count(Outcome.FAILED),
            read_nbytes=done * self.item_nbytes,
        )
        return outcomes


class WriteBatch:
    """A `Batch` that writes what is not held yet. The block above the first one is pinned."""

    def __init__(
        self, tier: FileTier, chain: KeyChain, sources: Sequence[memoryview], namespace: int
    ) -> None:
        check_memory(chain, sources)
        self.item_nbytes = slot_nbytes(chain.block_nbytes)
        self._tier, self._chain, self._sources, self._namespace = tier, chain, sources, namespace
        index = tier.index
        self._num_held = index.lookup(chain.keys)
        above = chain.keys[self._num_held - 1] if self._num_held else chain.parent
        self._pinned = [] if above is None else index.pin([above])
        self._orphan = above is not None and not self._pinned
        wanted = 0 if self._orphan else len(chain) - self._num_held
        self._slots: list[Slot] = index.reserve(chain.block_nbytes, wanted)
        self._written = bytearray(len(self._slots))
        self._ready = 0

    def __len__(self) -> int:
        return len(self._slots)

    def run(self, index: int) -> None:
        """See `Batch.run`."""
        chain, number = self._chain, self._num_held + index
        header, source = _header_page(), self._sources[number]
        slot = self._slots[index]
        encode_header(
            header,
            source[: chain.block_nbytes],
            key=chain.keys[number],
            parent=chain.keys[number - 1] if number else chain.parent,
            namespace=chain.namespace,
            generation=slot.generation,
        )
        try:
            buffers = [header, source[: self.item_nbytes - HEADER_NBYTES]]
            count = self._tier.volume.write(slot.offset, buffers)
            self._written[index] = count == self.item_nbytes
        except OSError as error:
            _log.warning("a block cannot be written: %s", error)
        if not self._written[index]:
            self._tier.counters.add(num_failed=1)

    def ready_blocks(self) -> int:
        """See `Batch.ready_blocks`."""
        while self._ready < len(self._slots) and self._written[self._ready]:
            self._ready += 1
        return self._num_held + self._ready

    def finish(self) -> list[Outcome]:
        """See `Batch.finish`."""
        tier, chain, held = self._tier, self._chain, self._num_held
        index = tier.index
        index.release([s for s, good in zip(self._slots, self._written, strict=True) if not good])
        new = chain.keys[held : held + len(self._slots)]
        rows = index.publish(
            new,
            [s if good else None for s, good in zip(self._slots, self._written, strict=True)],
            parent=chain.keys[held - 1] if held else chain.parent,
            namespace=self._namespace,
            block_nbytes=chain.block_nbytes,
        )
        index.unpin(self._pinned)
        tier.commit()
        rest = Outcome.ORPHAN if self._orphan else Outcome.FULL
        outcomes = [Outcome.DONE] * held
        for row, good in zip(rows, self._written, strict=True):
            lost = Outcome.ORPHAN if good else Outcome.FAILED
            outcomes.append(Outcome.DONE if row is not None else lost)
        outcomes += [rest] * (len(chain) - len(outcomes))
        tier.counters.add(
            num_refused=outcomes.count(Outcome.FULL) + outcomes.count(Outcome.ORPHAN),
            written_nbytes=sum(self._written) * self.item_nbytes,
        )
        return outcomes


def check_memory(chain: KeyChain, memory: Sequence[memoryview]) -> None:
    """Raise ValueError unless there is one large enough buffer a block."""
    if len(memory) != len(chain):
        raise ValueError(f"{len(chain)} blocks need as many buffers, not {len(memory)}")
    needed = align_up(chain.block_nbytes)
    if any(len(view) < needed for view in memory):
        raise ValueError(f"every buffer must be at least {needed} bytes long")
