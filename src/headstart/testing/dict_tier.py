"""`DictTier`: the smallest honest tier, to copy from when writing one.

Its medium is a dict of `Entry`. Blocks are Python `bytes`, so an entry that was discarded stays
readable for the batches that hold it. Eviction scans for the leaf that was used longest ago:
simple, and slow. The tier's methods answer the caller, its `Books` know what is held, its two
batches move bytes.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headstart.errors import ClosedError, ConfigError
from headstart.keys import Namespace
from headstart.tiers.base import Batch, Progress
from headstart.types import BlockKey, KeyChain, NamespaceId, Outcome, TierStats, VerifyReport
from headstart.units import align_up

_COUNTS = (
    *("num_hits", "num_misses", "num_stored", "num_evicted", "num_discarded", "num_dropped"),
    *("num_refused", "read_nbytes", "written_nbytes"),
)


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """A block as it lies on the medium, and its place in the books."""

    namespace: NamespaceId
    parent: BlockKey | None
    data: bytes
    checksum: bytes
    used: int
    pins: int = 0

    @property
    def nbytes(self) -> int:
        """What it takes from the capacity."""
        return align_up(len(self.data))


class Books:
    """What is held, and the room that is left. Callers hold `lock`."""

    def __init__(self, capacity_nbytes: int, entries: dict[BlockKey, Entry]) -> None:
        self.lock = threading.RLock()
        self.capacity_nbytes = capacity_nbytes
        self.entries = entries
        # Held blocks, and the room that open writes have reserved.
        self.used_nbytes = sum(entry.nbytes for entry in entries.values())
        self.clock = max((entry.used for entry in entries.values()), default=0)
        self.counts = dict.fromkeys(_COUNTS, 0)

    def find(self, namespace: NamespaceId, key: BlockKey) -> Entry | None:
        """The entry held under this key in this namespace."""
        entry = self.entries.get(key)
        return entry if entry is not None and entry.namespace == namespace else None

    def use(self, entries: Iterable[Entry | None]) -> None:
        """Mark entries as used just now, parents earlier than their children."""
        for entry in entries:
            if entry is not None:
                self.clock += 1
                entry.used = self.clock

    def pin(self, entries: Iterable[Entry | None], pins: int) -> None:
        """Protect entries from eviction (`pins` is 1), or no longer (-1)."""
        for entry in entries:
            if entry is not None:
                entry.pins += pins

    def reserve(self, nbytes: int) -> bool:
        """Take room from the capacity, evicting leaves; False when all that is left is pinned."""
        while self.used_nbytes + nbytes > self.capacity_nbytes:
            victim = self.victim()
            if victim is None:
                return False
            self.forget([victim], "num_evicted")
        self.used_nbytes += nbytes
        return True

    def release(self, nbytes: int) -> None:
        """Give room back."""
        self.used_nbytes -= nbytes

    def victim(self) -> BlockKey | None:
        """The unpinned leaf that was used longest ago."""
        parents = {entry.parent for entry in self.entries.values()}
        leaves = [key for key in self.entries if key not in parents]
        free = [key for key in leaves if not self.entries[key].pins]
        return min(free, key=lambda key: self.entries[key].used, default=None)

    def publish(self, chain: KeyChain, index: int, data: bytes) -> bool:
        """Hold a written block, in the room reserved for it. False when its parent has gone."""
        parent, key = chain.run(index, index + 1).parent, chain.keys[index]
        if parent is not None and self.find(chain.namespace, parent) is None:
            return False
        if key in self.entries:  # held meanwhile, or by another namespace: that block stays
            return False
        checksum = block_checksum(chain.namespace, key, data)
        self.entries[key] = Entry(
            namespace=chain.namespace, parent=parent, data=data, checksum=checksum, used=0
        )
        self.use([self.entries[key]])
        return True

    def forget(self, keys: Iterable[BlockKey], count: str) -> int:
        """Remove blocks and their descendants, add them to this counter, return how many."""
        doomed = {key for key in keys if key in self.entries}
        newest = doomed
        while newest:
            newest = {key for key, entry in self.entries.items() if entry.parent in newest} - doomed
            doomed |= newest
        for key in doomed:
            self.release(self.entries.pop(key).nbytes)
        self.counts[count] += len(doomed)
        return len(doomed)

    def is_sound(self, key: BlockKey, entry: Entry) -> bool:
        """The bytes are those that were written under this key in this namespace."""
        return entry.checksum == block_checksum(entry.namespace, key, entry.data)

    def check_invariants(self) -> None:
        """Nothing is held without its parent, and the room is accounted for."""
        held_nbytes = sum(entry.nbytes for entry in self.entries.values())
        assert held_nbytes <= self.used_nbytes <= self.capacity_nbytes
        assert all(e.parent is None or e.parent in self.entries for e in self.entries.values())


class DictRead:
    """An open read: holds its entries, so that it reads what it decided to read."""

    def __init__(
        self,
        books: Books,
        chain: KeyChain,
        targets: Sequence[memoryview],
        entries: list[Entry | None],
    ) -> None:
        self.books, self.chain, self.targets, self.entries = books, chain, targets, entries
        self.item_nbytes = chain.block_nbytes
        self.outcomes = [Outcome.MISS] * len(chain)

    def __len__(self) -> int:
        return len(self.chain)

    def run(self, index: int) -> None:
        key, entry = self.chain.keys[index], self.entries[index]
        if entry is None:
            return
        if len(entry.data) != self.chain.block_nbytes or not self.books.is_sound(key, entry):
            self.outcomes[index] = Outcome.DROPPED
            return
        self.targets[index][: len(entry.data)] = entry.data
        self.outcomes[index] = Outcome.DONE

    def ready_blocks(self) -> int:
        waiting = (i for i, outcome in enumerate(self.outcomes) if outcome is not Outcome.DONE)
        return next(waiting, len(self.outcomes))

    def finish(self) -> list[Outcome]:
        with self.books.lock:
            self.books.pin(self.entries, -1)
            read = zip(self.chain, self.entries, self.outcomes, strict=True)
            dropped = [(key, entry) for key, entry, o in read if o is Outcome.DROPPED]
            # A damaged entry may have been replaced since this read began; the new one stays.
            damaged = [key for key, entry in dropped if self.books.entries.get(key) is entry]
            self.books.forget(damaged, "num_dropped")
            num_hits = self.outcomes.count(Outcome.DONE)
            self.books.counts["num_hits"] += num_hits
            self.books.counts["num_misses"] += self.outcomes.count(Outcome.MISS)
            self.books.counts["read_nbytes"] += num_hits * self.chain.block_nbytes
        return self.outcomes


class DictWrite:
    """An open write: room reserved, copies of its sources, published when it finishes."""

    def __init__(self, books: Books, chain: KeyChain, sources: Sequence[memoryview]) -> None:
        """Decide. The caller holds the lock of the books."""
        self.books, self.chain, self.sources = books, chain, sources
        self.item_nbytes = chain.block_nbytes
        self.slot_nbytes = align_up(chain.block_nbytes)
        self.data: list[bytes | None] = [None] * len(chain)
        self.outcomes = [Outcome.MISS] * len(chain)
        self.reserved: set[int] = set()
        held = [books.find(chain.namespace, key) for key in chain]
        parent = None if chain.parent is None else books.find(chain.namespace, chain.parent)
        self.pinned = [parent, *held]
        books.use(self.pinned)
        books.pin(self.pinned, 1)
        self._num_accepted = len(chain)
        if parent is None and chain.parent is not None:
            self._refuse(0, Outcome.ORPHAN)
        for index in range(len(chain)):
            if index < self._num_accepted and held[index] is None:
                if books.reserve(self.slot_nbytes):
                    self.reserved.add(index)
                else:
                    self._refuse(index, Outcome.FULL)

    def __len__(self) -> int:
        return self._num_accepted

    def run(self, index: int) -> None:
        self.data[index] = bytes(self.sources[index][: self.chain.block_nbytes])

    def ready_blocks(self) -> int:
        waiting = (index for index, data in enumerate(self.data) if data is None)
        return next(waiting, len(self.data))

    def finish(self) -> list[Outcome]:
        """Publish in chain order, give back the room of what is not published, unpin."""
        with self.books.lock:
            for index, key in enumerate(self.chain):
                data = self.data[index]
                if index in self.reserved and data and self.books.publish(self.chain, index, data):
                    self.books.counts["num_stored"] += 1
                    self.books.counts["written_nbytes"] += len(data)
                elif index in self.reserved:
                    self.books.release(self.slot_nbytes)
                if self.books.find(self.chain.namespace, key) is not None:
                    self.outcomes[index] = Outcome.DONE
            self.books.pin(self.pinned, -1)
            refused = [outcome in (Outcome.FULL, Outcome.ORPHAN) for outcome in self.outcomes]
            self.books.counts["num_refused"] += sum(refused)
        return self.outcomes

    def _refuse(self, index: int, why: Outcome) -> None:
        """Refuse the block at `index`, and with it all that follow."""
        self._num_accepted = index
        self.outcomes[index:] = [why] * (len(self.chain) - index)


class DictTier:
    """A tier in a dict. Thread-safe; one lock guards the books, copying happens outside it.

    `medium` is what an earlier tier left; it becomes this one's.
    """

    name = "dict"
    # Parts that a subclass may replace: the kit's own tests break them one by one.
    books_type: ClassVar[type[Books]] = Books
    read_type: ClassVar[type[DictRead]] = DictRead
    write_type: ClassVar[type[DictWrite]] = DictWrite

    def __init__(
        self, *, capacity_nbytes: int, medium: dict[BlockKey, Entry] | None = None
    ) -> None:
        self.books = self.books_type(capacity_nbytes, {} if medium is None else medium)
        self._namespaces: set[NamespaceId] = set()
        self._closed = False

    def open_namespace(self, namespace: Namespace) -> None:
        self._check_open()
        if namespace.layout.padded_nbytes > self.books.capacity_nbytes:
            raise ConfigError(
                f"a block of {namespace.layout.block_nbytes} bytes does not fit a tier of "
                f"{self.books.capacity_nbytes}; raise the capacity or use a smaller block_size"
            )
        self._namespaces.add(namespace.id)

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        self._check_open()
        missing = (index for index, key in enumerate(keys) if key not in self.books.entries)
        return next(missing, len(keys))

    def touch(self, keys: Sequence[BlockKey]) -> None:
        with self.books.lock:
            self.books.use([self.books.entries[key] for key in keys[: self.lookup(keys)]])

    def begin_read(self, chain: KeyChain, targets: Sequence[memoryview]) -> Batch:
        with self.books.lock:
            self._check_open(chain.namespace)
            entries = [self.books.find(chain.namespace, key) for key in chain]
            self.books.use(entries)
            self.books.pin(entries, 1)
            return self.read_type(self.books, chain, targets, entries)

    def begin_write(self, chain: KeyChain, sources: Sequence[memoryview]) -> Batch:
        with self.books.lock:
            self._check_open(chain.namespace)
            return self.write_type(self.books, chain, sources)

    def discard(self, keys: Sequence[BlockKey]) -> int:
        with self.books.lock:
            self._check_open()
            return self.books.forget(keys, "num_discarded")

    def discard_namespace(self, namespace: NamespaceId) -> int:
        with self.books.lock:
            self._check_open()
            entries = self.books.entries.items()
            keys = [key for key, entry in entries if entry.namespace == namespace]
            return self.books.forget(keys, "num_discarded")

    def usage(self) -> dict[NamespaceId, int]:
        with self.books.lock:
            self._check_open()
            held = dict.fromkeys(self._namespaces, 0)
            for entry in self.books.entries.values():
                held[entry.namespace] = held.get(entry.namespace, 0) + len(entry.data)
            return held

    def stats(self) -> TierStats:
        with self.books.lock:
            self._check_open()
            counts: dict[str, Any] = dict(self.books.counts)
            return TierStats(
                name=self.name,
                capacity_nbytes=self.books.capacity_nbytes,
                used_nbytes=self.books.used_nbytes,
                num_blocks=len(self.books.entries),
                **counts,
            )

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        with self.books.lock:
            self._check_open()
            start_s, entries = time.monotonic(), dict(self.books.entries)
            damaged = []
            for number, (key, entry) in enumerate(entries.items(), start=1):
                if not self.books.is_sound(key, entry):
                    damaged.append(key)
                if progress is not None:
                    progress(number, len(entries))
            self.books.forget(damaged, "num_dropped")
            return VerifyReport(
                tier=self.name,
                num_blocks=len(entries),
                num_damaged=len(damaged),
                num_failed=0,
                read_nbytes=sum(len(entry.data) for entry in entries.values()),
                seconds=time.monotonic() - start_s,
            )

    def flush(self) -> bool:
        self._check_open()
        return True

    def close(self) -> None:
        self._closed = True

    def check_invariants(self) -> None:
        """Those of the books."""
        with self.books.lock:
            self.books.check_invariants()

    def _check_open(self, namespace: NamespaceId | None = None) -> None:
        if self._closed:
            raise ClosedError(f"tier {self.name!r} is closed")
        if namespace is not None and namespace not in self._namespaces:
            raise ConfigError("the chain's namespace is unknown; call open_namespace first")


def block_checksum(namespace: NamespaceId, key: BlockKey, data: bytes) -> bytes:
    """Binds the bytes of a block to its key and namespace."""
    return hashlib.blake2b(namespace + key + data, digest_size=16).digest()
