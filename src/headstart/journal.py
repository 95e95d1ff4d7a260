"""The index on disk: one append-only log of row records, apart from the payload.

    file   = file header, group, group, ...
    header = "HSTINDEX" | version u32 | record length u32 | directory uuid 16 | xxh3-64 of these
    group  = number of records u32 | magic u32 | xxh3-64(records, seed = group's offset) | records

A group is the changes of one commit, in order; the last record of a row holds, so any prefix of the
log is a state the index really had. Opening reads until the first group that is torn or wrong and
cuts there. When most of the log is outdated it is compacted: a new file with one record a held
block, written, synced and renamed over the old one. No payload is read to open a million blocks.

Appends are not synced: the page cache survives `kill -9`, and after a power failure every block is
still checked against its own header before anyone sees it.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from headstart.forest import rooted
from headstart.index import Index
from headstart.rows import NO_PARENT, RECORD, by_value

LOG_VERSION = 1
_FILE_HEADER = struct.Struct("<8sII16sQ")
_GROUP_HEADER = struct.Struct("<IIQ")
_MAGIC = b"HSTINDEX"
_GROUP_MAGIC = 0x50524748
_SLACK_RECORDS = 1 << 16
_MAX_BACKLOG_NBYTES = 64 << 20


class Journal:
    """Keeps `path` in step with an index. Thread-safe; commits are ordered."""

    def __init__(self, path: Path, *, uuid: bytes) -> None:
        self._path = path
        self._uuid = uuid
        self._lock = threading.Lock()
        self._fd = -1
        # Names are looked up in the directory that was opened, wherever its path leads later.
        self._folder = -1
        self._end = 0  # file offset after the last whole group
        self._num_records = 0
        self._backlog = b""  # changes that are not written yet
        self._gap = False  # changes were forgotten: only a compaction makes the log whole
        self.num_cut = 0
        """Bytes cut off a torn end when the log was read."""

    def read(self) -> np.ndarray:
        """The newest record of every held row; cuts a torn end off the file.

        A missing log, or one of another directory or version, is an empty index.
        Raises OSError when the file cannot be read or written.
        """
        self._folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._fd = self._open(self._path.name, 0)
        size = os.fstat(self._fd).st_size
        content = bytearray(size)
        _read_all(self._fd, memoryview(content))
        if content[: _FILE_HEADER.size] != self._file_header():
            self._start_empty()
            self.num_cut = size
            return np.zeros(0, RECORD)
        groups, self._end = _parse_groups(content)
        self.num_cut = size - self._end
        if self.num_cut:
            os.ftruncate(self._fd, self._end)
        # One group, the usual case after a clean stop, is used as it lies in the file.
        joined = groups[0] if len(groups) == 1 else b"".join(groups)
        records = np.frombuffer(joined, RECORD)
        self._num_records = len(records)
        return newest(records)

    def commit(self, index: Index) -> None:
        """Append the index's changes since the last commit.

        Raises OSError when the medium refuses; the changes are then kept and written, in order,
        with the next commit. Beyond a limit they are forgotten: then nothing is appended, which
        would leave a log that is no past state, and commits compact until that succeeds.
        """
        with self._lock:
            self._collect(index)
            if self._backlog:
                self._write(_group(self._backlog, self._end))
                self._num_records += len(self._backlog) // RECORD.itemsize
                self._backlog = b""
            if self._gap or self._num_records > 2 * len(index) + _SLACK_RECORDS:
                self._compact(index)

    def compact(self, index: Index) -> None:
        """Rewrite the log to one record a held block, synced. Raises OSError; the old log stays."""
        with self._lock:
            self._compact(index)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            for fd in {self._fd, self._folder} - {-1}:
                os.close(fd)
            self._fd = self._folder = -1

    def _collect(self, index: Index) -> None:
        """Move the index's changes to the backlog, which is bounded."""
        self._backlog += index.take_log()
        if self._gap or len(self._backlog) > _MAX_BACKLOG_NBYTES:
            self._backlog, self._gap = b"", True

    def _compact(self, index: Index) -> None:
        # First the changes, which are kept if this fails. What changes before the records are
        # taken is in them and in the next commit, and says the same.
        self._collect(index)
        records = index.held()
        temporary = self._path.with_suffix(".tmp").name
        fd = self._open(temporary, os.O_TRUNC)
        try:
            header = self._file_header()
            group = _group(records.tobytes(), len(header)) if len(records) else b""
            _write_all(fd, header + group, 0)
            os.fsync(fd)
            folder = self._folder
            os.rename(temporary, self._path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._folder)
            raise
        os.close(self._fd)
        self._fd, self._end = fd, len(header) + len(group)
        self._num_records, self._backlog, self._gap = len(records), b"", False

    def _open(self, name: str, flags: int) -> int:
        flags |= os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._folder)

    def _start_empty(self) -> None:
        os.ftruncate(self._fd, 0)
        header = self._file_header()
        _write_all(self._fd, header, 0)
        self._end, self._num_records = len(header), 0

    def _write(self, group: bytes) -> None:
        _write_all(self._fd, group, self._end)
        self._end += len(group)

    def _file_header(self) -> bytes:
        fields = _FILE_HEADER.pack(_MAGIC, LOG_VERSION, RECORD.itemsize, self._uuid, 0)[:-8]
        return fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))


def newest(records: np.ndarray) -> np.ndarray:
    """The last record of every row, without rows whose last record frees them."""
    if not len(records):
        return records
    rows = records["row"].copy()
    last = np.full(int(rows.max()) + 1, -1, np.int64)
    last[rows] = np.arange(len(records))  # of several for one row, the last is assigned
    newest_of_row = np.zeros(len(records), bool)
    newest_of_row[last[last >= 0]] = True
    return select(records, newest_of_row & (records["block_nbytes"] > 0))


def select(records: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """`records[chosen]`, without the copy when all are chosen."""
    return records if chosen.all() else records[chosen]


def restorable(
    records: np.ndarray,
    *,
    capacity_nbytes: int,
    slab_nbytes: int,
    slot_nbytes: Callable[[int], int],
) -> np.ndarray:
    """The records that can be restored as they stand: a closed forest of well-placed blocks.

    `records` are the newest of their row. A sound log loses none here unless the capacity shrank;
    this is the second check of a pair, after the log's checksums. Refused are blocks that overlap
    a newer one, lie outside the capacity or off their slab's slot grid, and all whose ancestor is
    refused or missing.
    """
    if not len(records):
        return records
    slot = by_value(records["block_nbytes"], slot_nbytes)
    slab, within = np.divmod(records["offset"], np.uint64(slab_nbytes))
    num_slabs = capacity_nbytes // slab_nbytes
    good = (slot <= slab_nbytes) & (slab < num_slabs)
    good &= (within % slot == 0) & (within + slot <= slab_nbytes)
    order = np.lexsort((records["generation"], records["offset"]))
    good[order[:-1][np.diff(records["offset"][order]) == 0]] = False
    slab = np.minimum(slab, np.uint64(num_slabs))  # one more for all that lie outside
    slot_of_slab = np.zeros(num_slabs + 1, np.uint64)
    slot_of_slab[slab] = slot  # a slab has one slot size: that of its last record
    good &= slot == slot_of_slab[slab]
    above = _parents(records)
    good &= above >= 0
    return select(records, rooted(np.where(good, above, len(records)), good))


def _parents(records: np.ndarray) -> np.ndarray:
    """Place of each record's parent among the records; `len(records)`: none, -1: it is gone."""
    place = np.full(int(records["row"].max()) + 2, -1, np.int64)
    place[records["row"]] = np.arange(len(records))
    parent = np.minimum(records["parent"].astype(np.int64), len(place) - 1)
    above: np.ndarray = np.where(records["parent"] == NO_PARENT, len(records), place[parent])
    return above


def _group(records: bytes, offset: int) -> bytes:
    checksum = xxhash.xxh3_64_intdigest(records, seed=offset)
    return _GROUP_HEADER.pack(len(records) // RECORD.itemsize, _GROUP_MAGIC, checksum) + records


def _parse_groups(content: bytearray) -> tuple[list[memoryview], int]:
    """The records of all whole groups, and the offset after the last of them."""
    groups: list[memoryview] = []
    view, position = memoryview(content), _FILE_HEADER.size
    while position + _GROUP_HEADER.size <= len(content):
        count, magic, checksum = _GROUP_HEADER.unpack_from(content, position)
        start = position + _GROUP_HEADER.size
        stop = start + count * RECORD.itemsize
        if magic != _GROUP_MAGIC or count == 0 or stop > len(content):
            break
        if checksum != xxhash.xxh3_64_intdigest(view[start:stop], seed=position):
            break
        groups.append(view[start:stop])
        position = stop
    return groups, position


def _read_all(fd: int, target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], done)
        if count == 0:
            return
        done += count


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
