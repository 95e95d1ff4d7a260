"""Nodes for the connector's tests, and engines over the make-believe model of `harness.py`.

Nothing here imports torch or vLLM before a test asks for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headstart.node import protocol
from headstart.node.client import ClientLimits, command
from headstart.node.server import Server, listening
from headstart.node.services import Services
from headstart.store import PrefixStore
from headstart.testing import FaultyTier
from headstart.tiers import FileTier, FileTierOptions, MemoryTier
from headstart.transfer import Transfer

SOON = 20.0
SLOT = 16 << 10
PATIENT = ClientLimits(ask_s=SOON, open_s=SOON)
"""For tests that are about something else than time."""


def wait_for(condition, what="it"):
    """Wait until a condition holds; fail when it does not come to pass. Its last value."""
    deadline = time.monotonic() + SOON
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} never came to pass"
        time.sleep(0.005)
    return value


class LocalNode:
    """A node in this process, so that its tiers can be slow or faulty. Restartable."""

    def __init__(self, root, *, memory_blocks=256, file_blocks=2048):
        self.root, self.path = root, root / "node.sock"
        self._memory_blocks, self._file_blocks = memory_blocks, file_blocks
        self._exit = None
        self.start()

    def start(self):
        memory = MemoryTier(
            capacity_nbytes=self._memory_blocks * SLOT, slab_nbytes=4 * SLOT, huge_pages=False
        )
        file = FileTier(
            FileTierOptions(
                root=self.root / "file",
                capacity_nbytes=self._file_blocks * 2 * SLOT,
                durable=False,
            )
        )
        self.memory, self.file, self.slow = memory, file, FaultyTier(file)
        nbytes = max(1, self._memory_blocks // 2) * SLOT
        transfer = Transfer("test", num_threads=2, max_queued_nbytes=nbytes)
        self.store = PrefixStore(memory, [(self.slow, transfer)])
        self.services = Services(self.store)
        self._exit = contextlib.ExitStack()
        self._exit.callback(self.store.close)
        self._exit.callback(self.services.close)
        sock = self._exit.enter_context(listening(self.path))
        self._exit.callback(Server(sock, self.services, lambda timeout_s: None).close)

    def stop(self):
        """End it; what is queued is written."""
        if self._exit is not None:
            self.slow.resume()
            self._exit.close()
            self._exit = None

    def restart(self):
        self.stop()
        self.start()

    def forget_memory(self):
        """From now on only the file tier holds what is stored."""
        assert self.store.flush(SOON)
        for namespace in list(self.store.usage()["memory"]):
            self.memory.discard_namespace(namespace)

    def gauges(self):
        return self.services.gauges()

    def settled(self):
        """Nobody holds anything."""
        assert self.store.flush(SOON)
        wait_for(lambda: _is_quiet(self.gauges()), f"an end of {self.gauges()}")
        for tier in (self.memory, self.file):
            wait_for(lambda tier=tier: not tier.index.rows.column("pins").any(), "an end of pins")
            tier.check_invariants()


def _is_quiet(gauges):
    names = ("leases", "leases_claimed", "reservations", "promotions_waiting", "pinned_bytes")
    return not any(gauges[name] for name in names)


SETTINGS = """
[memory]
capacity = "8MiB"
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


class ProcessNode:
    """`headstart node run` as a process."""

    def __init__(self, folder):
        self.path, self._config = folder / "node.sock", folder / "node.toml"
        self._config.write_text(SETTINGS.format(folder=folder))
        self._process = None
        self.start()

    def start(self):
        command_line = [sys.executable, "-m", "headstart", "node", "run", "--config", self._config]
        self._process = subprocess.Popen(
            command_line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout.readline()

    def kill(self):
        """As the kernel does when memory is short."""
        self._end(signal.SIGKILL)

    def stop(self):
        """End it as an operator does; what is queued is written."""
        self._end(signal.SIGTERM)

    def freeze(self):
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self):
        os.kill(self._process.pid, signal.SIGCONT)

    def gauges(self):
        return command(self.path, protocol.Status(), SOON).fields["gauges"]

    def settled(self):
        wait_for(lambda: _is_quiet(self.gauges()), f"an end of {self.gauges()}")

    def _end(self, number):
        if self._process is not None:
            self._process.send_signal(number)
            self._process.communicate(timeout=SOON)
            self._process = None

    def close(self):
        if self._process is not None:
            self.thaw()
            self.kill()


@pytest.fixture
def make_node(tmp_path):
    """Makes nodes in this process."""
    made = []

    def make(**options):
        root = tmp_path / f"node{len(made)}"
        root.mkdir(mode=0o700)
        made.append(LocalNode(root, **options))
        return made[-1]

    yield make
    for node in made:
        node.stop()


@pytest.fixture
def node(make_node):
    """A node in this process."""
    return make_node()


@pytest.fixture
def process_node(tmp_path):
    """A node of its own process."""
    node = ProcessNode(tmp_path)
    yield node
    node.close()


@pytest.fixture
def node_class():
    """For tests that make many nodes, one after another."""
    return LocalNode


@pytest.fixture
def soon():
    """Waits until a condition holds."""
    return wait_for


@pytest.fixture(scope="session")
def harness():
    """The module `harness.py`, which imports vLLM."""
    place = Path(__file__).with_name("harness.py")
    spec = importlib.util.spec_from_file_location("vllm_harness", place)
    module = importlib.util.module_from_spec(spec)
    sys.modules["vllm_harness"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_folder(harness, tmp_path_factory):
    """A tiny model's folder."""
    return harness.make_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def make_engine(harness, tiny_folder, monkeypatch):
    """Makes engines for the socket of a node; `limits` are their clients'. Closed at the end."""
    from headstart.engines.vllm import connector

    made = []
    client = connector.NodeClient

    def make(path, *, limits=PATIENT, **options):
        monkeypatch.setattr(connector, "NodeClient", functools.partial(client, limits=limits))
        made.append(harness.Engine(tiny_folder, path, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
