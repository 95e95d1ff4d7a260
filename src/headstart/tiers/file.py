"""The file tier: blocks in preallocated slabs on a local disk or a raw block device.

    write:  reserve a slot -> one pwritev of header and payload -> full length? -> publish -> log
    read:   pin the row -> one preadv straight into the target -> verify all of it -> unpin

A block is findable only after its bytes are written, and believed only after its key, namespace,
generation and checksums were compared. Nothing is synced a block: what a crash loses is a miss.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headstart.blockfile import Damage, slot_nbytes
from headstart.errors import ClosedError, ConfigError, HeadstartError, TierUnavailableError
from headstart.index import Index
from headstart.journal import Journal, restorable, select
from headstart.keys import Namespace
from headstart.policies import make_policy
from headstart.slots import default_slab_nbytes
from headstart.tiers.base import Batch, Progress
from headstart.tiers.counters import Counters
from headstart.tiers.filebatch import ReadBatch, WriteBatch
from headstart.tiers.numbers import NamespaceNumbers
from headstart.tiers.rootdir import RootDir
from headstart.tiers.volume import DeviceVolume, SlabFiles, Volume
from headstart.types import BlockKey, KeyChain, NamespaceId, Outcome, TierStats, VerifyReport
from headstart.units import PAGE_NBYTES, align_up, format_nbytes

_log = logging.getLogger(__name__)

_TOUCH_S = 3600.0
_SAMPLE_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTierOptions:
    """Settings of a file tier. `capacity_nbytes` is a hard limit on the payload's disk space."""

    root: Path
    capacity_nbytes: int
    policy: str = "lru"
    slab_nbytes: int | None = None
    """None: what the directory has, or a 16th of the capacity within [1 MiB, 1 GiB]."""
    durable: bool = True
    """False allows a root on tmpfs."""
    device: Path | None = None
    """A raw block device for the payload; `root` then holds only the bookkeeping."""
    direct: bool = True
    """False forces I/O through the page cache."""
    name: str = "file"
    namespace_ttl_s: float = 30 * 86400.0
    """Blocks of a namespace that was not opened for so long are given up at the next start."""


class FileTier:
    """A `Tier` on slab files or a block device. One owner per directory."""

    name = "file"
    """Unless the options give another: statistics of several tiers are told apart by it."""

    def __init__(
        self,
        options: FileTierOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens or creates the directory.

        Raises ConfigError or TierUnavailableError; then nothing is left open, a cache that was
        there is as it was, and of a new one nothing is left behind.
        """
        self._clock, self._wall_clock = clock, wall_clock
        self._touched_at = wall_clock()
        self._opened: set[int] = set()  # numbers of namespaces
        self._pid = os.getpid()
        self.name = options.name
        self._policy = make_policy(options.policy, clock=clock)
        _check_sizes(options)
        self.counters = Counters()
        self._lock = threading.Lock()
        self._closed = False
        try:
            with contextlib.ExitStack() as undo:
                self._open(options, wall_clock(), undo)
                undo.pop_all()
        except HeadstartError:
            raise
        except OSError as error:
            raise TierUnavailableError(
                error.errno, f"root {options.root}: {error.strerror}"
            ) from error

    @property
    def damage(self) -> Counter[Damage]:
        """Dropped blocks by cause since the tier was opened."""
        return self.counters.damage

    def open_namespace(self, namespace: Namespace) -> None:
        """See `Tier.open_namespace`."""
        self._check_open()
        needed, slab = slot_nbytes(namespace.layout.block_nbytes), self.index.slots.slab_nbytes
        if needed > slab:
            raise ConfigError(
                f"a block of {format_nbytes(needed)} with its header does not fit a slab of "
                f"{format_nbytes(slab)}; set slab_nbytes and capacity to at least that, or use a "
                "smaller block size"
            )
        with self._lock:
            try:
                if namespace.id in self.namespaces:
                    self._root.touch_namespace(self.namespaces[namespace.id])
                else:
                    self._root.add_namespace(self.namespaces.add(namespace.id), namespace)
            except OSError as error:
                # It works for this process; its blocks are given up at the next start.
                _log.warning("a namespace cannot be written down: %s", error)
            number = self.namespaces[namespace.id]
            self._opened.add(number)
            self.index.block_tokens[number] = namespace.layout.block_size

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """See `Tier.lookup`."""
        self._check_open()
        return self.index.lookup(keys)

    def sample(self) -> KeyChain | None:
        """See `Sampled.sample`."""
        self._check_open()
        with self._lock:
            ids = {number: space for space, number in self.namespaces.items()}
            opened = set(self._opened)
        records = [r for r in self.index.held(_SAMPLE_ROWS) if int(r["namespace"]) in opened]
        return _chain_of(records[0], ids) if records else None

    def begin_probe(self, chain: KeyChain, targets: Sequence[memoryview]) -> Batch:
        """See `Sampled.begin_probe`."""
        self._check_open()
        return ReadBatch(self, chain, targets, is_use=False)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See `Tier.touch`."""
        self._check_open()
        self.index.touch(keys)

    def begin_read(self, chain: KeyChain, targets: Sequence[memoryview]) -> Batch:
        """See `Tier.begin_read`."""
        self._check_open()
        return ReadBatch(self, chain, targets)

    def begin_write(self, chain: KeyChain, sources: Sequence[memoryview]) -> Batch:
        """See `Tier.begin_write`."""
        self._check_open()
        return WriteBatch(self, chain, sources, self.namespaces[chain.namespace])

    def discard(self, keys: Sequence[BlockKey]) -> int:
        """See `Tier.discard`."""
        self._check_open()
        count = self.index.discard(keys)
        self.commit()
        return count

    def discard_namespace(self, namespace: NamespaceId) -> int:
        """See `Tier.discard_namespace`."""
        self._check_open()
        count = self.index.discard_namespace(self.namespaces[namespace])
        self.commit()
        return count

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
        """See `Tier.verify`. It is no use of a block: what is hot afterwards was hot before."""
        self._check_open()
        started, damaged, failed, nbytes = self._clock(), 0, 0, 0
        records = self.index.held()
        with self._lock:  # after the records, so that their namespaces are all known
            ids = {number: space for space, number in self.namespaces.items()}
        target = memoryview(mmap.mmap(-1, align_up(int(records["block_nbytes"].max(initial=1)))))
        for done, record in enumerate(records):
            chain = _chain_of(record, ids)
            batch = ReadBatch(self, chain, [target], is_use=False)
            if len(batch):
                batch.run(0)
            (outcome,) = batch.finish()
            damaged += outcome is Outcome.DROPPED
            failed += outcome is Outcome.FAILED
            nbytes += chain.block_nbytes
            if progress is not None:
                progress(done + 1, len(records))
        return VerifyReport(
            tier=self.name,
            num_blocks=len(records),
            num_damaged=damaged,
            num_failed=failed,
            read_nbytes=nbytes,
            seconds=self._clock() - started,
        )

    def flush(self) -> bool:
        """See `Tier.flush`. Blocks are written when `finish` returns; only the log may lag."""
        self._check_open()
        return self.commit()

    def close(self) -> None:
        """Compact the log and release the directory. Batches must be finished before."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if os.getpid() == self._pid:  # else a fork's copy, whose index is not the directory's
            self._touch_namespaces()
            try:
                self._journal.compact(self.index)
            except OSError as error:
                _log.warning("the index could not be compacted: %s", error)
        self._journal.close()
        self.volume.close()
        self._root.close()

    def check_invariants(self) -> None:
        """Assert the index's invariants; for tests."""
        self.index.check_invariants()

    def commit(self) -> bool:
        """Write the index's changes to the log; what the disk refuses now is written later."""
        if self._wall_clock() - self._touched_at > _TOUCH_S:
            self._touch_namespaces()
        try:
            self._journal.commit(self.index)
        except OSError as error:
            self.counters.add(num_failed=1)
            _log.warning("the index log cannot be written: %s", error)
            return False
        return True

    def _touch_namespaces(self) -> None:
        """Note that the namespaces opened by this process are in use."""
        self._touched_at = self._wall_clock()
        for number in list(self._opened):
            with contextlib.suppress(OSError):
                self._root.touch_namespace(number)

    def _open(self, options: FileTierOptions, now: float, undo: contextlib.ExitStack) -> None:
        """Open everything; `undo` learns how to close it again."""
        self._root = RootDir(options.root, durable=options.durable)
        undo.callback(self._root.abandon)
        uuid, slab_nbytes = self._root.describe(
            slab_nbytes=options.slab_nbytes,
            default_slab_nbytes=default_slab_nbytes(options.capacity_nbytes),
        )
        if options.capacity_nbytes < slab_nbytes:
            raise ConfigError(
                f"capacity {format_nbytes(options.capacity_nbytes)} is smaller than one slab of "
                f"{options.root}, {format_nbytes(slab_nbytes)}; set a larger capacity, or a "
                "smaller slab_nbytes, which empties the cache"
            )
        self.volume = _open_volume(options, self._root.slabs, slab_nbytes=slab_nbytes, uuid=uuid)
        undo.callback(self.volume.close)
        if options.device is not None:
            self._root.settle()  # the device is claimed under the directory's uuid
        self.index = Index(
            capacity_nbytes=self.volume.capacity_nbytes,
            slab_nbytes=slab_nbytes,
            policy=self._policy,
            slot_nbytes=slot_nbytes,
            logged=True,
        )
        self._journal = Journal(self._root.log, uuid=uuid)
        undo.callback(self._journal.close)
        self.namespaces = NamespaceNumbers(self._namespaces_in_use(options.namespace_ttl_s, now))
        logged = self._journal.read()
        known = np.isin(logged["namespace"], np.array([*self.namespaces.values()], np.uint32))
        records = restorable(
            select(logged, known),
            capacity_nbytes=self.volume.capacity_nbytes,
            slab_nbytes=slab_nbytes,
            slot_nbytes=slot_nbytes,
        )
        self.index.restore(records)
        if len(records) < len(logged):
            # Else what is given up now would be back after a crash, over what is stored since.
            self._journal.compact(self.index)

    def _namespaces_in_use(self, ttl_s: float, now: float) -> dict[NamespaceId, int]:
        """Known namespaces; those not opened for `ttl_s` are given up with their blocks."""
        numbers = {}
        for number, space in self._root.namespaces().items():
            if self._root.idle_s(number, now) > ttl_s:
                _log.info("namespace %d was unused for over %.0f s; reclaimed", number, ttl_s)
                self._root.remove_namespace(number)
            else:
                numbers[space] = number
        return numbers

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError("the file tier belongs to the process that opened it")
        if self._closed:
            raise ClosedError("the file tier is closed")


def _open_volume(
    options: FileTierOptions, folder: Path, *, slab_nbytes: int, uuid: bytes
) -> Volume:
    if options.device is None:
        return SlabFiles(
            folder,
            capacity_nbytes=options.capacity_nbytes,
            slab_nbytes=slab_nbytes,
            direct=options.direct,
        )
    return DeviceVolume(
        options.device,
        capacity_nbytes=options.capacity_nbytes,
        slab_nbytes=slab_nbytes,
        uuid=uuid,
        direct=options.direct,
    )


def _check_sizes(options: FileTierOptions) -> None:
    """Refuse what cannot be before anything on the disk is touched."""
    capacity, slab, least = options.capacity_nbytes, options.slab_nbytes, slot_nbytes(1)
    if capacity < least:
        raise ConfigError(
            f"capacity {format_nbytes(capacity)} is smaller than the smallest block with its "
            f"header, {format_nbytes(least)}"
        )
    if slab is not None and (not least <= slab <= capacity or slab % PAGE_NBYTES):
        raise ConfigError(
            f"slab_nbytes={slab} must be a multiple of {PAGE_NBYTES} in "
            f"[{least}, capacity={capacity}]"
        )


def _chain_of(record: np.void, ids: dict[int, NamespaceId]) -> KeyChain:
    """The chain of one held block."""
    return KeyChain(
        namespace=ids[int(record["namespace"])],
        block_nbytes=int(record["block_nbytes"]),
        keys=(BlockKey(bytes(record["key"])),),
    )
