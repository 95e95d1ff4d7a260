"""What a load cost a server and where its hits came from: /proc, and the server's /metrics.

Processes are a root and all below it. What a process that ended had computed is its parent's, if
that waited for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from headstart.bench.run import Request

_PROC = Path("/proc")
_OURS, _LOADED = "headstart:", "headstart:loaded_tokens_total"
ENGINE = "engine"
"""The tier's name under which the engine's own hits are told."""


def family(roots: Sequence[int]) -> list[int]:
    """The processes `roots` and all that descend from them, as far as they live."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdecimal() and (fields := _stat(int(folder.name))):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: list[int] = []
    waiting = [pid for pid in roots if _stat(pid)]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.append(pid)
            waiting += children.get(pid, [])
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """Seconds that processes, and those of their children that have ended, have computed."""
    ticks = 0
    for pid in pids:
        if fields := _stat(pid):
            ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return ticks / os.sysconf("SC_CLK_TCK")


def forget_peaks(pids: Iterable[int]) -> bool:
    """Let the peaks of processes begin anew; False where this kernel or user cannot."""
    try:
        for pid in pids:
            (_PROC / str(pid) / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_memory_nbytes(pids: Iterable[int]) -> int | None:
    """Resident memory of processes at most, since `forget_peaks`; None: not told.

    Their peaks added up, less what they share as it is now: an engine and its node map one arena.
    """
    total = 0
    for pid in pids:
        try:
            status = (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
            rollup = (_PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii")
        except OSError:
            if _stat(pid) is None:
                continue  # it has ended
            return None
        peak, resident, share = (
            _kib(text, name) for text, name in ((status, "VmHWM"), (rollup, "Rss"), (rollup, "Pss"))
        )
        total += max(0, peak - (resident - share)) * 1024
    return total


def read_nbytes(pids: Iterable[int]) -> int | None:
    """Bytes that devices gave to processes since they began; None: this kernel does not tell."""
    total = 0
    for pid in pids:
        try:
            lines = (_PROC / str(pid) / "io").read_text(encoding="ascii").splitlines()
        except OSError:
            if _stat(pid) is None:
                continue  # it has ended
            return None
        fields = dict(line.split(": ", 1) for line in lines)
        if "read_bytes" not in fields:
            return None
        total += int(fields["read_bytes"])
    return total


def loaded_tokens(metrics: str | None) -> dict[str, int] | None:
    """Tokens that a server has loaded since it started, by tier, by its page of metrics.

    None: it does not say.
    """
    if metrics is None:
        return None
    found: dict[str, int] = {}
    is_told = False
    try:
        for each in text_string_to_metric_families(metrics):
            for sample in each.samples:
                is_told = is_told or sample.name.startswith(_OURS)
                if sample.name == _LOADED:
                    tier = sample.labels["tier"]
                    found[tier] = found.get(tier, 0) + int(sample.value)
    except (ValueError, KeyError):
        return None
    return found if is_told else None


def hits_by_tier(
    requests: Sequence[Request], before: dict[str, int] | None, after: dict[str, int] | None
) -> dict[str, int] | None:
    """Where the cached tokens of a run came from; None: nobody can tell.

    That is so without the counters of `loaded_tokens`, where a request failed (it may have loaded
    something), and where more is said to be loaded than was cached.
    """
    if before is None or after is None or not all(request.is_good for request in requests):
        return None
    if any(request.cached_tokens is None for request in requests):
        return None
    loaded = {tier: count - before.get(tier, 0) for tier, count in after.items()}
    own = sum(request.cached_tokens or 0 for request in requests) - sum(loaded.values())
    if own < 0 or min(loaded.values(), default=0) < 0:
        return None
    return {ENGINE: own} | loaded


def _stat(pid: int) -> list[str] | None:
    """What follows a process's name: its state, its parent, ...; None: it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields


def _kib(text: str, name: str) -> int:
    line = next((line for line in text.splitlines() if line.startswith(f"{name}:")), "")
    return int(line.split()[1]) if line else 0
