"""Starting a node that outlives whoever starts it, exactly one however many try."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from headstart.config import node_environment, node_socket
from headstart.errors import ConfigError, HeadstartError
from headstart.node import protocol
from headstart.node.client import command
from headstart.settings import Settings

START_S = 60.0
_POLL_S = 0.05


def is_running(path: Path, timeout_s: float = 2.0) -> bool:
    """Whether a node answers at a socket."""
    try:
        return isinstance(command(path, protocol.Status(), timeout_s), protocol.State)
    except (OSError, HeadstartError):
        return False


def has_owner(path: Path) -> bool:
    """Whether a node has a socket's path: from before it answers until everything is closed."""
    try:
        with open(f"{path}.lock", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def ensure_node(
    settings: Settings,
    arguments: Sequence[str] = (),
    *,
    log: Path | None = None,
    timeout_s: float = START_S,
) -> Path:
    """The socket of a running node with these settings, started if there is none.

    The node gets a session of its own, all the machine's cores and an environment without what was
    meant for an engine; it is nobody's child, since engines end by killing their children.
    `arguments` go to `headstart node run`; `log`, by default beside the socket, takes its output.
    Raises ConfigError when it does not come up in time, with the last lines of its log.
    """
    path = node_socket(settings)
    if is_running(path):
        return path
    log = log or path.with_suffix(".log")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(f"{path}.start", "w", encoding="ascii") as lock:
            _start(path, arguments, log, lock, time.monotonic() + timeout_s)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"the node at {path} cannot be started: {error}") from error
    return path


def _start(path: Path, arguments: Sequence[str], log: Path, lock: TextIO, deadline: float) -> None:
    # Whoever comes second waits here, and then finds the node that the first one started.
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise _failure(path, log) from None
            time.sleep(_POLL_S)
    pid: int | None = None
    while not is_running(path):
        if pid is None and not has_owner(path):  # else another's node is about to come up
            pid = _spawn(path, arguments, log)
        is_lost = pid is not None and not _lives(pid) and not has_owner(path)
        if is_lost or time.monotonic() > deadline:
            raise _failure(path, log)
        time.sleep(_POLL_S)


def _spawn(path: Path, arguments: Sequence[str], log: Path) -> int:
    """Start a node by way of a process that ends at once; its process id."""
    node = [sys.executable, "-P", "-m", "headstart", "node", "run", "--socket", str(path)]
    with log.open("ab") as output:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _DETACH, *node, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            env=node_environment(),
            start_new_session=True,
            check=True,
            timeout=30.0,
        )
    return int(done.stdout)


# More cores than there are may be named; those of the cpuset are taken. Its output is the log's.
_DETACH = """
import os, signal, sys
os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
signal.pthread_sigmask(signal.SIG_SETMASK, ())
pid = os.fork()
if pid == 0:
    os.dup2(2, 1)
    os.execv(sys.argv[1], sys.argv[1:])
print(pid)
"""


def _lives(pid: int) -> bool:
    """Whether a process, nobody's child, has not ended; what nobody has waited for has."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def _failure(path: Path, log: Path) -> ConfigError:
    lines = log.read_text(errors="replace").splitlines()[-3:] if log.exists() else []
    return ConfigError(
        f"the node at {path} does not come up: {' / '.join(lines) or 'it said nothing'}; "
        f"its log is {log}"
    )
