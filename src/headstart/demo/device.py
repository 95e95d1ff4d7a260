"""Proof that bytes came from the device: the kernel's counters, with the page cache emptied first.

Also the facts about the machine that a reader of the figures needs, and nothing that names it.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from headstart.bench.counters import read_nbytes
from headstart.demo.results import DeviceReads
from headstart.units import format_nbytes

_SECTOR_NBYTES = 512
"""The unit of /sys/.../stat, whatever the device's own sectors are."""


def drop_page_cache(root: Path) -> None:
    """Write back and forget the cached pages of every file under `root`."""
    for path in sorted(root.rglob("*")):
        if not path.is_file():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def device_reads(root: Path, pid: int | None = None) -> DeviceReads:
    """The counters of a process (this one) and of the device under `root`, since they began."""
    process_nbytes = read_nbytes([os.getpid() if pid is None else pid])
    return DeviceReads(process_nbytes=process_nbytes, device_nbytes=_device_nbytes(root))


def difference(before: DeviceReads, after: DeviceReads) -> DeviceReads:
    """What was read between two readings of the counters."""
    return DeviceReads(
        process_nbytes=_minus(after.process_nbytes, before.process_nbytes),
        device_nbytes=_minus(after.device_nbytes, before.device_nbytes),
    )


def machine_facts(root: Path) -> dict[str, str]:
    """Processor, memory, file system and versions, by title."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "Processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "Memory": format_nbytes(pages),
        "File system": _file_system(root),
        "System": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "Python": platform.python_version(),
    }


def _minus(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


def _device_nbytes(root: Path) -> int | None:
    device = root.stat().st_dev
    stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    try:
        return int(stat.read_text(encoding="ascii").split()[2]) * _SECTOR_NBYTES
    except (OSError, IndexError, ValueError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _file_system(root: Path) -> str:
    """The type of the file system that `root` is on."""
    found, kind = "", "unknown"
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return kind
    for fields in (line.split() for line in lines):
        if root.resolve().is_relative_to(fields[1]) and len(fields[1]) >= len(found):
            found, kind = fields[1], fields[2]
    return kind
