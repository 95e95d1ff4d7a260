"""The memory tier: the arena with an index and eviction.

As a `Tier` it copies blocks in and out. The store, its owner, works without copies: it reserves
slots, lets engine or device fill them, and publishes them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np

from headstart.arena import Arena
from headstart.errors import ClosedError, ConfigError
from headstart.index import Index
from headstart.keys import Namespace
from headstart.policies import make_policy
from headstart.slots import Slot, default_slab_nbytes
from headstart.tiers.base import Batch, Progress
from headstart.tiers.counters import Counters
from headstart.tiers.filebatch import check_memory
from headstart.tiers.numbers import NamespaceNumbers
from headstart.types import BlockKey, KeyChain, NamespaceId, Outcome, TierStats, VerifyReport
from headstart.units import PAGE_NBYTES, align_up, format_nbytes


class MemoryTier:
    """A `Tier` in an arena of its own. What it holds ends with the process."""

    name = "memory"

    def __init__(
        self,
        *,
        capacity_nbytes: int,
        policy: str = "lru",
        slab_nbytes: int | None = None,
        huge_pages: bool = True,
    ) -> None:
        """Allocates all of it. Raises ConfigError when that is impossible or less than a page."""
        if capacity_nbytes < PAGE_NBYTES:
            raise ConfigError(
                f"memory.capacity: {capacity_nbytes} bytes are less than one block can have "
                f"({format_nbytes(PAGE_NBYTES)})"
            )
        self.index = Index(
            capacity_nbytes=capacity_nbytes,
            slab_nbytes=slab_nbytes or default_slab_nbytes(capacity_nbytes),
            policy=make_policy(policy),
            slot_nbytes=align_up,
        )
        self.arena = Arena(align_up(self.index.slots.capacity_nbytes), huge_pages=huge_pages)
        self.counters = Counters()
        self.namespaces = NamespaceNumbers({})
        self._lock = threading.Lock()
        self._closed = False

    def view(self, slot: Slot | int, block_nbytes: int) -> memoryview:
        """The memory of a slot, or of the slot at an offset: whole pages, until `close()`."""
        offset = slot if isinstance(slot, int) else slot.offset
        return self.arena.view(offset, align_up(block_nbytes))

    def open_namespace(self, namespace: Namespace) -> None:
        """See `Tier.open_namespace`."""
        self._check_open()
        needed, slab = namespace.layout.padded_nbytes, self.index.slots.slab_nbytes
        if needed > slab:
            raise ConfigError(
                f"memory.capacity: a block of {format_nbytes(needed)} does not fit a slab of "
                f"{format_nbytes(slab)}; set a larger capacity, or use a smaller block size"
            )
        with self._lock:
            if namespace.id not in self.namespaces:
                number = self.namespaces.add(namespace.id)
                self.index.block_tokens[number] = namespace.layout.block_size

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """See `Tier.lookup`."""
        self._check_open()
        return self.index.lookup(keys)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See `Tier.touch`."""
        self._check_open()
        self.index.touch(keys)

    def begin_read(self, chain: KeyChain, targets: Sequence[memoryview]) -> Batch:
        """See `Tier.begin_read`."""
        self._check_open()
        return _CopyOut(self, chain, targets)

    def begin_write(self, chain: KeyChain, sources: Sequence[memoryview]) -> Batch:
        """See `Tier.begin_write`."""
        self._check_open()
        return _CopyIn(self, chain, sources, self.namespaces[chain.namespace])

    def discard(self, keys: Sequence[BlockKey]) -> int:
        """See `Tier.discard`."""
        self._check_open()
        return self.index.discard(keys)

    def discard_namespace(self, namespace: NamespaceId) -> int:
        """See `Tier.discard_namespace`."""
        self._check_open()
        return self.index.discard_namespace(self.namespaces[namespace])

    def usage(self) -> dict[NamespaceId, int]:
        """See `Tier.usage`."""
        self._check_open()
        nbytes = self.index.usage
        return {space: nbytes.get(number, 0) for space, number in self.namespaces.items()}

    def stats(self) -> TierStats:
        """See `Tier.stats`."""
        self._check_open()
        return self.counters.stats(self.name, self.index)

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """See `Tier.verify`. Memory keeps no checksums: there is nothing to read again."""
        self._check_open()
        return VerifyReport(
            tier=self.name,
            num_blocks=len(self.index),
            num_damaged=0,
            num_failed=0,
            read_nbytes=0,
            seconds=0.0,
        )

    def flush(self) -> bool:
        """See `Tier.flush`. Memory promises nothing beyond the process; nothing to do."""
        self._check_open()
        return True

    def close(self) -> None:
        """Free the arena. Idempotent."""
        if not self._closed:
            self._closed = True
            self.arena.close()

    def check_invariants(self) -> None:
        """Assert the index's invariants; for tests."""
        self.index.check_invariants()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the memory tier is closed")


class _CopyOut:
    """A `Batch` that copies blocks out of the arena."""

    def __init__(self, tier: MemoryTier, chain: KeyChain, targets: Sequence[memoryview]) -> None:
        check_memory(chain, targets)
        self.item_nbytes = chain.block_nbytes
        self._tier, self._targets = tier, targets
        self._rows = tier.index.pin(
            chain.keys,
            namespace=tier.namespaces[chain.namespace],
            block_nbytes=chain.block_nbytes,
        )
        offsets = tier.index.rows.offset
        self._sources = [tier.view(offsets[row], chain.block_nbytes) for row in self._rows]
        self._outcomes = [Outcome.MISS] * len(chain)

    def __len__(self) -> int:
        return len(self._rows)

    def run(self, index: int) -> None:
        copy(self._targets[index], self._sources[index], self.item_nbytes)
        self._outcomes[index] = Outcome.DONE

    def ready_blocks(self) -> int:
        return _leading(self._outcomes)

    def finish(self) -> list[Outcome]:
        self._tier.index.unpin(self._rows)
        done = self._outcomes.count(Outcome.DONE)
        self._tier.counters.add(
            num_hits=done,
            num_misses=len(self._outcomes) - done,
            read_nbytes=done * self.item_nbytes,
        )
        return self._outcomes


class _CopyIn:
    """A `Batch` that copies blocks into the arena."""

    def __init__(
        self, tier: MemoryTier, chain: KeyChain, sources: Sequence[memoryview], namespace: int
    ) -> None:
        check_memory(chain, sources)
        self.item_nbytes = chain.block_nbytes
        self._tier, self._chain, self._sources, self._namespace = tier, chain, sources, namespace
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
        self._slots = index.reserve(chain.block_nbytes, wanted)
        self._written = bytearray(len(self._slots))

    def __len__(self) -> int:
        return len(self._slots)

    def run(self, index: int) -> None:
        target = self._tier.view(self._slots[index], self.item_nbytes)
        copy(target, self._sources[self._num_held + index], self.item_nbytes)
        self._written[index] = True

    def ready_blocks(self) -> int:
        return self._num_held + len(bytes(self._written).partition(b"\0")[0])

    def finish(self) -> list[Outcome]:
        tier, chain, held = self._tier, self._chain, self._num_held
        slots = [s if done else None for s, done in zip(self._slots, self._written, strict=True)]
        tier.index.release([s for s, kept in zip(self._slots, slots, strict=True) if kept is None])
        rows = tier.index.publish(
            chain.keys[held : held + len(slots)],
            slots,
            parent=chain.keys[held - 1] if held else chain.parent,
            namespace=self._namespace,
            block_nbytes=chain.block_nbytes,
        )
        tier.index.unpin(self._pinned)
        outcomes = [Outcome.DONE] * held
        for row, slot in zip(rows, slots, strict=True):
            lost = Outcome.MISS if slot is None else Outcome.ORPHAN
            outcomes.append(Outcome.DONE if row is not None else lost)
        rest = Outcome.ORPHAN if self._orphan else Outcome.FULL
        outcomes += [rest] * (len(chain) - len(outcomes))
        tier.counters.add(
            num_refused=outcomes.count(Outcome.FULL) + outcomes.count(Outcome.ORPHAN),
            written_nbytes=sum(self._written) * self.item_nbytes,
        )
        return outcomes


def copy(target: memoryview, source: memoryview, nbytes: int) -> None:
    """Copy bytes without holding the interpreter lock, as slice assignment would."""
    np.copyto(np.frombuffer(target, np.uint8, nbytes), np.frombuffer(source, np.uint8, nbytes))


def _leading(outcomes: Sequence[Outcome]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda outcome: outcome is Outcome.DONE, outcomes))
