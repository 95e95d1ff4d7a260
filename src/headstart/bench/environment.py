"""What a result was measured on: machine, versions, commit. No host names and no paths."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import headstart


def describe() -> dict[str, object]:
    """Facts that go into every result file."""
    return {
        "headstart": headstart.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_nbytes": int(_field("/proc/meminfo", "MemTotal").split()[0]) * 1024,
    }


def _commit() -> str:
    """The source's commit, with "+" for uncommitted changes; "unknown" outside a checkout."""
    source = Path(__file__).parent
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=source,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip()


def _field(path: str, name: str) -> str:
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""
