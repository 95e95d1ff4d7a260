"""The memory that holds blocks."""

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headstart import arena as arena_module
from headstart.arena import Arena
from headstart.errors import ConfigError
from headstart.units import PAGE_NBYTES

NBYTES = 64 * PAGE_NBYTES
F_GET_SEALS = 1034
DESCRIPTORS = Path("/proc/self/fd")


@pytest.fixture
def arena():
    arena = Arena(NBYTES)
    yield arena
    arena.close()


def test_views_are_page_aligned_writable_and_share_the_memory(arena):
    for offset in (0, PAGE_NBYTES, NBYTES - PAGE_NBYTES):
        view = arena.view(offset, PAGE_NBYTES)
        assert np.frombuffer(view, np.uint8).ctypes.data % PAGE_NBYTES == 0
        assert len(view) == PAGE_NBYTES
        view[:] = bytes([offset // PAGE_NBYTES]) * PAGE_NBYTES
    assert bytes(arena.view(PAGE_NBYTES, 4)) == b"\1" * 4
    assert os.pread(arena.fd, 4, NBYTES - PAGE_NBYTES) == b"\x3f" * 4


def test_all_of_it_is_allocated_at_start(arena):
    status = os.fstat(arena.fd)
    assert status.st_size == NBYTES
    assert status.st_blocks * 512 >= NBYTES


def test_it_is_sealed(arena):
    """A process that maps it can trust its size: no SIGBUS."""
    assert fcntl.fcntl(arena.fd, F_GET_SEALS) & 0x6 == 0x6
    for size in (0, NBYTES + PAGE_NBYTES):
        with pytest.raises(OSError) as refused:
            os.ftruncate(arena.fd, size)
        assert refused.value.errno == errno.EPERM


def test_another_process_can_map_it(arena):
    arena.view(0, 5)[:] = b"hello"
    code = (
        "import mmap, sys; m = mmap.mmap(int(sys.argv[1]), 4096); "
        "sys.stdout.write(m[:5].decode()); m[:5] = b'there'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(arena.fd)],
        pass_fds=[arena.fd],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "hello"
    assert bytes(arena.view(0, 5)) == b"there"


def test_its_descriptor_is_not_inherited(arena):
    assert not os.get_inheritable(arena.fd)


@pytest.mark.parametrize("huge_pages", [True, False])
def test_huge_pages_change_nothing_that_is_seen(huge_pages):
    nbytes = (5 << 20) + PAGE_NBYTES
    arena = Arena(nbytes, huge_pages=huge_pages)
    view = arena.view(0, nbytes)
    view[:5], view[-5:] = b"first", b"final"
    assert (os.pread(arena.fd, 5, 0), os.pread(arena.fd, 5, nbytes - 5)) == (b"first", b"final")
    assert not any(view[5:-5])
    arena.close()


def test_no_more_huge_pages_are_asked_for_when_the_time_is_up(monkeypatch):
    """A slow kernel costs seconds at start, not minutes."""
    monkeypatch.setattr(arena_module, "_COLLAPSE_NBYTES", 2 << 20)
    asked = []

    def clock():
        asked.append(len(asked))
        return 1000.0 * len(asked)

    Arena(64 << 20, clock=clock).close()
    assert len(asked) <= 3


def test_closing_is_idempotent_and_frees(arena):
    arena.close()
    arena.close()
    assert arena.fd == -1
    with pytest.raises(ValueError):
        arena.view(0, 1)


def test_views_that_are_held_outlive_close(arena):
    view = arena.view(PAGE_NBYTES, PAGE_NBYTES)
    view[:3] = b"abc"
    arena.close()
    assert bytes(view[:3]) == b"abc"
    view[:3] = b"xyz"
    assert bytes(view[:3]) == b"xyz"


@pytest.mark.parametrize("nbytes", [0, -PAGE_NBYTES, 1, PAGE_NBYTES - 1, PAGE_NBYTES + 1])
def test_a_size_that_is_not_whole_pages_is_refused(nbytes):
    with pytest.raises(ConfigError, match="multiple of 4096"):
        Arena(nbytes)


def test_more_memory_than_there_is_is_a_clear_error_and_not_a_kill():
    with pytest.raises(ConfigError, match=r"memory\.capacity: .* more than .* set a smaller"):
        Arena(1 << 50)


def test_memory_that_cannot_be_allocated_is_a_clear_error(monkeypatch):
    def refuse(fd, offset, length):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    opened = len(list(DESCRIPTORS.iterdir()))
    monkeypatch.setattr(arena_module.os, "posix_fallocate", refuse)
    with pytest.raises(ConfigError, match=r"memory\.capacity: cannot allocate 256 KiB: Cannot"):
        Arena(NBYTES)
    assert len(list(DESCRIPTORS.iterdir())) == opened, "the descriptor leaks"


def test_it_is_populated(arena):
    """The first touch of a block costs no page fault."""
    resident = mmap.mmap(arena.fd, NBYTES)
    resident.close()
    with open("/proc/self/smaps", encoding="ascii") as maps:
        text = maps.read()
    start = np.frombuffer(arena.view(0, 1), np.uint8).ctypes.data
    entry = text[text.index(f"{start:x}-") :]
    size = next(line for line in entry.splitlines() if line.startswith("Rss:"))
    assert int(size.split()[1]) * 1024 == NBYTES
