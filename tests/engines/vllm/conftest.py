"""Nodes for the connector's tests, and engines over the make-believe model of `harness.py`.

Nothing here imports torch or vLLM before a test asks for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from pathlib import Path

import pytest

from headstart.node.server import Server, listening
from headstart.node.services import Services
from headstart.store import PrefixStore
from headstart.testing import FaultyTier
from headstart.tiers import FileTier, FileTierOptions, MemoryTier
from headstart.transfer import Transfer
from node_process import PATIENT, SOON, NodeProcess, wait_for
from vllm_cases import tokens

SLOT = 16 << 10


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
        self.services = Services(self.store, tick_s=None)
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


class ProcessNode(NodeProcess):
    """A node of its own process."""

    def settled(self):
        """Nobody holds anything."""
        wait_for(lambda: _is_quiet(self.gauges()), f"an end of {self.gauges()}")


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
    node = ProcessNode(tmp_path, memory="8MiB")
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


@pytest.fixture
def fresh(node, make_engine):
    """Starts an engine whose own cache is empty."""
    return lambda **options: make_engine(node.path, **options)


@pytest.fixture
def filled(node, fresh):
    """Fills the node with a prompt of 100 tokens, 6 blocks and some; the prompt."""
    engine, prompt = fresh(), tokens(100)
    told = engine.ask("fill", prompt)
    assert (told["outcome"], told["stored_blocks"]) == ("miss", 6)
    engine.settle()
    node.settled()
    return prompt
