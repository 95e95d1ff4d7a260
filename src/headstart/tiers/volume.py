"""Where a file tier's payload lies: slab files on a file system, or a raw block device.

Both are one linear space of `capacity_nbytes`, addressed by byte offset. Reads and writes go past
the page cache (O_DIRECT) wherever the medium takes it: the same throughput at a third to an eighth
of the CPU, and nobody else's cached pages are pushed out.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import stat
import struct
from pathlib import Path
from typing import Protocol

from headstart.errors import ConfigError, RootLockedError, TierUnavailableError
from headstart.units import PAGE_NBYTES, format_nbytes

_log = logging.getLogger(__name__)
_BLKGETSIZE64 = 0x80081272
DEVICE_RESERVED_NBYTES = 1 << 20
_SUPERBLOCK = struct.Struct("<8s16s")
_SUPERBLOCK_MAGIC = b"HSTDEVIC"


class Volume(Protocol):
    """A fixed linear space of bytes. Offsets and lengths are multiples of the page size.

    `read` and `write` block, may be called from any thread, and raise OSError; they return the
    number of bytes moved, which is short only when the medium is.
    """

    capacity_nbytes: int
    direct: bool

    def read(self, offset: int, buffers: list[memoryview]) -> int:
        """Fill `buffers` in turn from `offset`."""

    def write(self, offset: int, buffers: list[memoryview]) -> int:
        """Write `buffers` in turn at `offset`."""

    def close(self) -> None:
        """Close all files."""


class SlabFiles:
    """One file of `slab_nbytes` a slab, all preallocated, so that the disk cannot fill up later."""

    def __init__(
        self, folder: Path, *, capacity_nbytes: int, slab_nbytes: int, direct: bool
    ) -> None:
        """Creates what is missing. Raises TierUnavailableError when there is not enough room."""
        self.capacity_nbytes = capacity_nbytes // slab_nbytes * slab_nbytes
        self.direct = direct and _takes_direct_io(folder)
        self._slab_nbytes = slab_nbytes
        self._fds: list[int] = []
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
        num_slabs = capacity_nbytes // slab_nbytes
        created: list[Path] = []
        try:
            for number in range(num_slabs):
                path = folder / f"{number:06d}.slab"
                if not path.exists():
                    created.append(path)
                self._fds.append(os.open(path, flags, 0o600))
                os.posix_fallocate(self._fds[-1], 0, slab_nbytes)
        except OSError as error:
            self.close()
            for path in created:
                path.unlink(missing_ok=True)
            raise TierUnavailableError(
                error.errno, _no_room(error, folder, capacity_nbytes)
            ) from error
        for path in folder.glob("*.slab"):
            if not path.stem.isdigit() or int(path.stem) >= num_slabs:
                path.unlink()  # left over from a larger capacity

    def read(self, offset: int, buffers: list[memoryview]) -> int:
        """See `Volume.read`."""
        number, position = divmod(offset, self._slab_nbytes)
        return os.preadv(self._fd(number), buffers, position)

    def write(self, offset: int, buffers: list[memoryview]) -> int:
        """See `Volume.write`."""
        number, position = divmod(offset, self._slab_nbytes)
        return os.pwritev(self._fd(number), buffers, position)

    def close(self) -> None:
        """Close all files. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())

    def _fd(self, number: int) -> int:
        try:
            return self._fds[number]
        except IndexError:
            raise OSError(errno.EBADF, "the slabs are closed") from None


class DeviceVolume:
    """A raw block device, after a superblock that says whose it is.

    A device is taken only when its first MiB is all zeros or carries this directory's uuid, so that
    a mistyped path never overwrites a file system.
    """

    def __init__(
        self, device: Path, *, capacity_nbytes: int, slab_nbytes: int, uuid: bytes, direct: bool
    ) -> None:
        """Raises ConfigError or TierUnavailableError when the device cannot be used."""
        self.direct = direct
        flags = os.O_RDWR | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            if not stat.S_ISBLK(device.stat().st_mode):
                raise ConfigError(
                    f"device: {device} is not a block device; use `root` alone for a directory"
                )
            self._fd = os.open(device, flags)
        except OSError as error:
            kind = RootLockedError if error.errno == errno.EBUSY else TierUnavailableError
            raise kind(error.errno, f"device {device}: {error.strerror}") from error
        self.capacity_nbytes = capacity_nbytes // slab_nbytes * slab_nbytes
        try:
            self._check_room(device, capacity_nbytes)
            _claim(device, uuid)
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, buffers: list[memoryview]) -> int:
        """See `Volume.read`."""
        return os.preadv(self._fd, buffers, DEVICE_RESERVED_NBYTES + offset)

    def write(self, offset: int, buffers: list[memoryview]) -> int:
        """See `Volume.write`."""
        return os.pwritev(self._fd, buffers, DEVICE_RESERVED_NBYTES + offset)

    def close(self) -> None:
        """Close the device. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _check_room(self, device: Path, capacity_nbytes: int) -> None:
        size = struct.unpack("Q", fcntl.ioctl(self._fd, _BLKGETSIZE64, bytes(8)))[0]
        room = max(0, size - DEVICE_RESERVED_NBYTES)
        if capacity_nbytes > room:
            raise ConfigError(
                f"capacity {format_nbytes(capacity_nbytes)} is more than the {format_nbytes(room)} "
                f"of {device}; set a smaller capacity"
            )


def _claim(device: Path, uuid: bytes) -> None:
    """Mark a device as that of a directory, unless somebody else's bytes are on it."""
    superblock = _SUPERBLOCK.pack(_SUPERBLOCK_MAGIC, uuid)
    # Through a second, buffered descriptor: superblock and probe need no alignment there.
    with open(device, "r+b") as file:
        head = file.read(DEVICE_RESERVED_NBYTES)
        if head.startswith(superblock):
            return
        if any(head):
            whose = "another cache directory" if head.startswith(_SUPERBLOCK_MAGIC) else "data"
            raise ConfigError(
                f"device {device} holds {whose} and would be overwritten; if it may be lost, "
                f"clear it with: dd if=/dev/zero of={device} bs=1M count=1"
            )
        file.seek(0)
        file.write(superblock)
        file.flush()
        os.fsync(file.fileno())


def _takes_direct_io(folder: Path) -> bool:
    """Whether files in `folder` take aligned O_DIRECT writes; said once in the log where not."""
    path = folder / "direct-io.probe"
    page = memoryview(mmap.mmap(-1, PAGE_NBYTES))  # anonymous maps are page-aligned
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            return os.pwritev(fd, [page], 0) == PAGE_NBYTES
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise TierUnavailableError(error.errno, f"{folder}: {error.strerror}") from error
        _log.warning("%s takes no direct I/O; blocks go through the page cache", folder)
        return False
    finally:
        path.unlink(missing_ok=True)


def _no_room(error: OSError, folder: Path, capacity_nbytes: int) -> str:
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        status = os.statvfs(folder)
        free = status.f_bavail * status.f_frsize
        return (
            f"{folder}: no room for a capacity of {format_nbytes(capacity_nbytes)}, "
            f"{format_nbytes(free)} are free; set a smaller capacity or free some space"
        )
    return f"{folder}: {error.strerror}"
