"""A node as a process, for every test that wants one, and how to wait for things."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from headstart.node import protocol
from headstart.node.client import ClientLimits, command

SOON = 20.0
PATIENT = ClientLimits(ask_s=SOON, open_s=SOON)
"""For tests that are about something else than time."""

SETTINGS = """
[memory]
capacity = "{memory}"
huge_pages = "off"

[[tiers]]
kind = "file"
root = "{folder}/file"
capacity = "64MiB"
durable = false
inflight_nbytes = "4MiB"
threads = 4

[node]
socket = "{folder}/node.sock"
metrics_port = 0
"""


def write_settings(folder, memory="16MiB"):
    """A settings file for a small node in `folder`; its path."""
    path = folder / "node.toml"
    path.write_text(SETTINGS.format(folder=folder, memory=memory))
    return path


def wait_for(condition, what="it", timeout_s=SOON, poll_s=0.005):
    """Wait until a condition holds; fail when it does not come to pass. Its last value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} never came to pass"
        time.sleep(poll_s)
    return value


def freeze(pid):
    """Stop a process, and wait until each of its threads stands still."""
    os.kill(pid, signal.SIGSTOP)
    states = [thread / "stat" for thread in Path(f"/proc/{pid}/task").iterdir()]
    wait_for(lambda: all(s.read_text().rpartition(")")[2].split()[0] == "T" for s in states))


class NodeProcess:
    """`headstart node run` as a process."""

    def __init__(self, folder, *options, memory="16MiB"):
        self.folder, self.path = folder, folder / "node.sock"
        self.config = write_settings(folder, memory)
        self._options = options
        self._log = folder / "node.log"
        self.start()

    def start(self):
        words = ["node", "run", "--config", str(self.config), *self._options]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headstart", *words],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.pid = self._process.pid
        self.ready = self._process.stdout.readline()
        assert self.ready, self.errors

    @property
    def errors(self):
        """What it has said on stderr."""
        return self._log.read_text()

    def status(self):
        return command(self.path, protocol.Status(), SOON).fields

    def gauges(self):
        return self.status()["gauges"]

    def signal(self, number):
        self._process.send_signal(number)

    def freeze(self):
        freeze(self.pid)

    def thaw(self):
        self.signal(signal.SIGCONT)

    def wait(self):
        """Its exit code, when it has ended."""
        self._process.communicate(timeout=SOON)
        return self._process.returncode

    def stop(self):
        """End it as an operator does; what is queued is written."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self):
        """As the kernel does when memory is short."""
        self.signal(signal.SIGKILL)
        return self.wait()

    def close(self):
        if self._process.returncode is None:
            self.kill()
