"""The memory that holds blocks on their way to and from the engine.

One memfd, allocated in full at start, so that running out of memory is an error then and never a
SIGBUS later; sealed against shrinking, so that a process that maps it can trust its size; mapped
with all its pages present, so that a block's first use costs no page faults; in huge pages where
the kernel gives them, because a direct read pins every page that it fills (measured for 1 MiB: half
the CPU and 15 % more bandwidth).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import time
from collections.abc import Callable

from headstart.errors import ConfigError
from headstart.units import PAGE_NBYTES, format_nbytes

_F_ADD_SEALS = 1033  # fcntl.h; not in every Python build's fcntl module
_MADV_COLLAPSE = 25  # mman.h, Linux 6.1
_MADV_POPULATE_WRITE = 23  # mman.h, Linux 5.14
_HUGE_PAGE_NBYTES = 2 << 20
_COLLAPSE_NBYTES = 32 << 20
_HUGE_PAGES_S = 1.0
_HUGE_PAGES_BYTES_PER_S = 4 << 30
_F_SEAL_SHRINK, _F_SEAL_GROW = 0x2, 0x4


class Arena:
    """`nbytes` of page-aligned shared memory, seen through memoryviews.

    The arena knows no blocks: who may use which bytes is the index's business.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        huge_pages: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocates. Raises ConfigError when the machine has not that much memory to give."""
        if nbytes < PAGE_NBYTES or nbytes % PAGE_NBYTES:
            raise ConfigError(f"arena size {nbytes} must be a positive multiple of {PAGE_NBYTES}")
        _refuse_beyond_memory(nbytes)
        self.nbytes = nbytes
        self.fd = -1
        try:
            self.fd = sealed_memory("headstart-arena", nbytes)
            self._map = _map_aligned(self.fd, nbytes)
        except OSError as error:
            if self.fd >= 0:
                os.close(self.fd)
            raise ConfigError(
                f"memory.capacity: cannot allocate {format_nbytes(nbytes)}: {error.strerror}; "
                "set a smaller capacity"
            ) from error
        if huge_pages:
            _take_huge_pages(self._map, clock)
        with contextlib.suppress(OSError):  # an older kernel: pages come with their first use
            self._map.madvise(_MADV_POPULATE_WRITE)
        self._memory = memoryview(self._map)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes [offset, offset + nbytes), writable. Valid until `close()`."""
        return self._memory[offset : offset + nbytes]

    def close(self) -> None:
        """Unmap and free. Views that are still held keep the mapping, not the file descriptor."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._memory.release()
        # A caller may still hold a view; then the mapping goes with the last of them.
        with contextlib.suppress(BufferError):
            self._map.close()


def sealed_memory(name: str, nbytes: int) -> int:
    """The descriptor of a new memfd, allocated in full and of this size for ever.

    Raises OSError when there is not so much memory.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _map_aligned(fd: int, nbytes: int) -> mmap.mmap:
    """A mapping that starts at a huge page, if the kernel lets itself be led there.

    It puts a new mapping right below the last one. So one that is as long as the first try was
    beyond a huge page's start moves the second try down to that start.
    """
    mapped = mmap.mmap(fd, nbytes)
    beyond = ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % _HUGE_PAGE_NBYTES
    if beyond == 0 or nbytes < _HUGE_PAGE_NBYTES:
        return mapped
    mapped.close()
    with mmap.mmap(-1, beyond):
        return mmap.mmap(fd, nbytes)


def _take_huge_pages(mapped: mmap.mmap, clock: Callable[[], float]) -> None:
    """Turn what can be into huge pages, from the start, as far as the kernel agrees.

    Bounded in time: on bare metal a GiB takes 0.2 s, in a virtual machine whose host has to find
    the memory first it was seen to take 5 s.
    """
    whole = len(mapped) // _HUGE_PAGE_NBYTES * _HUGE_PAGE_NBYTES
    deadline = clock() + _HUGE_PAGES_S + len(mapped) / _HUGE_PAGES_BYTES_PER_S
    with contextlib.suppress(OSError):  # an older kernel, no alignment, or no free huge pages
        for offset in range(0, whole, _COLLAPSE_NBYTES):
            if clock() > deadline:
                return
            mapped.madvise(_MADV_COLLAPSE, offset, min(_COLLAPSE_NBYTES, whole - offset))


def available_nbytes() -> int:
    """Memory that the machine could still give, as the kernel estimates it."""
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _refuse_beyond_memory(nbytes: int) -> None:
    """fallocate on a memfd beyond the free memory may end in the OOM killer; ask first."""
    available = available_nbytes()
    if nbytes > available:
        raise ConfigError(
            f"memory.capacity: {format_nbytes(nbytes)} is more than the {format_nbytes(available)} "
            "of memory available; set a smaller capacity"
        )
