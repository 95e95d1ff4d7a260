"""Children that end when the process that started them is gone, also if it was killed.

A server that outlives its bench keeps the GPU. Linux sends a signal of the child's choice when its
parent ends; the choice outlives an exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_LAUNCHER = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {signal.SIGTERM:d})
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def bound(words: Sequence[str]) -> list[str]:
    """A command that gets SIGTERM when this process is gone; its pid is that of `words`.

    To be started by the main thread: Linux takes the end of a thread for that of the parent.
    """
    return [sys.executable, "-S", "-c", _LAUNCHER, str(os.getpid()), *words]


def end_with(parent: int) -> None:
    """Let this process be killed when its parent is gone, or end now if it is already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
