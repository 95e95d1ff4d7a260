"""A node's parts in this process, nodes as processes, and engines as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from device_rig import Rig
from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.node.client import NodeClient
from headstart.node.mapping import ArenaMapping
from headstart.node.server import Server, listening
from headstart.node.services import Services
from headstart.store import PrefixStore
from headstart.testing import CountingTier, FaultyTier
from headstart.tiers import FileTier, FileTierOptions, MemoryTier
from headstart.transfer import Transfer
from headstart.types import Outcome
from node_process import PATIENT, SOON, NodeProcess, freeze, wait_for

BLOCK = 64 << 10
LAYOUT = BlockLayout(block_size=16, axes="byte", shape=(BLOCK,), dtype="uint8")
NAMESPACE = Namespace(model="node", weights="none", layout=LAYOUT)


def chain(path, namespace=NAMESPACE):
    return keys_from_hashes(namespace, [str(content).encode() for content in path])


def content(key):
    return key * (BLOCK // len(key))


class World:
    """A store of a small arena above a file tier, with the services and the server of a node.

    Time passes for leases only when `now` is set. `slow` makes the file tier slow or faulty,
    `counted` counts its batches.
    """

    def __init__(self, root, *, memory_blocks=64, file_blocks=512, lease_ttl_s=60.0):
        self.root, self.now = root, 0.0
        self.memory = MemoryTier(
            capacity_nbytes=memory_blocks * BLOCK, slab_nbytes=8 * BLOCK, huge_pages=False
        )
        self.file = FileTier(
            FileTierOptions(
                root=root / "file", capacity_nbytes=file_blocks * 2 * BLOCK, durable=False
            )
        )
        self.slow = FaultyTier(self.file)
        self.counted = CountingTier(self.slow)
        transfer = Transfer("test", num_threads=4, max_queued_nbytes=memory_blocks * BLOCK // 2)
        self.store = PrefixStore(self.memory, [(self.counted, transfer)])
        self.store.open_namespace(NAMESPACE)
        self.services = Services(
            self.store, lease_ttl_s=lease_ttl_s, tick_s=None, clock=lambda: self.now
        )
        self.sessions, self.promotions = self.services.sessions, self.services._promotions
        self.stops = []
        self.server = None
        self.path = root / "node.sock"
        self._exit = contextlib.ExitStack()

    def serve(self):
        """Listen, if it does not yet; the socket's path."""
        if self.server is None:
            sock = self._exit.enter_context(listening(self.path))
            self.server = Server(sock, self.services, self.stops.append)
            self._exit.callback(self.server.close)
        return self.path

    def put(self, path, start=0):
        """Store `path` from block `start` on, also in the file tier."""
        run = chain(path).run(start, len(path))
        assert self.store.store(run, [content(key) for key in run]) == [Outcome.DONE] * len(run)
        assert self.store.flush(SOON)

    def forget_memory(self):
        """From now on only the file tier holds what is stored."""
        assert self.store.flush(SOON)
        self.memory.discard_namespace(NAMESPACE.id)

    def wrap(self, times=3):
        """Store so much that the whole arena is used `times` times over."""
        for number in range(times * 4):
            self.put([f"wrap {time.monotonic_ns()} {number} {n}" for n in range(16)])

    def block(self, offset):
        """The bytes of the slot at an offset."""
        return bytes(self.memory.view(offset, BLOCK))

    def counts(self, **expected):
        """Whether the sessions count so; what is not named is zero."""
        names = ("engines", "sessions", "workers", "leases", "leases_claimed", "reservations")
        return self.sessions.counts() == dict.fromkeys(names, 0) | expected

    def settled(self):
        """Nothing is held for anybody any more."""
        self.slow.resume()
        wait_for(lambda: self.counts(), f"an end of {self.sessions.counts()}")
        wait_for(lambda: not self.promotions.pinned_nbytes, "an end of what is pinned")
        assert not self.promotions.num_waiting
        assert self.store.flush(SOON)
        for tier in (self.memory, self.file):
            wait_for(lambda tier=tier: not tier.index._reserved, "an end of reserved slots")
            wait_for(lambda tier=tier: not tier.index.rows.column("pins").any(), "an end of pins")
            tier.check_invariants()

    def close(self):
        self.slow.resume()
        self._exit.close()
        self.services.close()
        self.store.close()


@pytest.fixture
def make_world(tmp_path):
    """Makes worlds; at the end nothing may be held in any, and all their threads must end."""
    worlds = []
    before = threading.active_count()

    def make(**options):
        root = tmp_path / f"world{len(worlds)}"
        root.mkdir()
        worlds.append(World(root, **options))
        return worlds[-1]

    yield make
    try:
        for world in worlds:
            world.settled()
    finally:
        for world in worlds:
            world.close()
    wait_for(lambda: threading.active_count() <= before, "an end of all threads")


@pytest.fixture
def world(make_world):
    return make_world()


@pytest.fixture
def clients():
    """Makes `NodeClient`s of this process; closed after the test and before the world."""
    made = []

    def make(path, workers=(), **options):
        client = NodeClient(path, workers, **{"limits": PATIENT} | options)
        client.open_namespace(NAMESPACE)
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()


@pytest.fixture
def client(world, clients):
    """A session without workers with the served `world`."""
    return clients(world.serve())


@pytest.fixture
def mappings():
    """Makes `ArenaMapping`s of this process; closed after the test and before the world."""
    made = []

    def make(path):
        made.append(ArenaMapping(path, timeout_s=SOON))
        assert made[-1].attach()
        return made[-1]

    yield make
    for mapping in made:
        mapping.close()


@pytest.fixture
def connect(world):
    """Opens raw connections to the served `world`."""
    socks = []

    def make():
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        socks.append(sock)
        sock.settimeout(SOON)
        sock.connect(os.fspath(world.serve()))
        return sock

    yield make
    for sock in socks:
        sock.close()


class Process:
    """A program of `engine.py` beside this file: one line of JSON a question, one an answer."""

    def __init__(self, role, path):
        script = Path(__file__).with_name("engine.py")
        self._process = subprocess.Popen(
            [sys.executable, script, role, path, str(SOON)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def ask(self, question, **fields):
        """The answer to a question."""
        self._process.stdin.write(json.dumps({"question": question} | fields) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"it died of {question}"
        return json.loads(line)

    def freeze(self):
        freeze(self.pid)

    def thaw(self):
        os.kill(self.pid, signal.SIGCONT)

    def kill(self):
        """As the kernel does when memory is short."""
        self._process.kill()
        self._process.communicate()


class Engine:
    """A scheduler and its workers, each a process."""

    def __init__(self, path, num_workers=2):
        self.workers = [Process("worker", path) for _ in range(num_workers)]
        tokens = [worker.ask("attach") for worker in self.workers]
        self.scheduler = Process("scheduler", path)
        assert self.scheduler.ask("open", workers=tokens, namespace=NAMESPACE.to_json())

    @property
    def processes(self):
        return [self.scheduler, *self.workers]

    def promote(self, path):
        """Promote and claim; ticket and offsets."""
        asked = self.scheduler.ask("promote", names=[str(name) for name in path])
        return asked["ticket"], self.scheduler.ask("claim", ticket=asked["ticket"])

    def kill(self):
        for process in self.processes:
            process.kill()


@pytest.fixture
def engines(world):
    """Makes engines of the served `world`."""
    made = []

    def make(**options):
        made.append(Engine(world.serve(), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.kill()


@pytest.fixture
def make_node(tmp_path):
    """Starts nodes as processes, all with the settings in `tmp_path / "node.toml"`."""
    nodes = []

    def make(*options):
        nodes.append(NodeProcess(tmp_path, *options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def node(make_node):
    return make_node()


@pytest.fixture
def soon():
    """Waits until a condition holds."""
    return wait_for


@pytest.fixture
def make_rig(tmp_path, monkeypatch):
    """Makes stores whose device is slow by a clock, one after another over the same files."""
    monkeypatch.setattr("headstart.tiers.filebatch.COALESCE_NBYTES", 1)
    rigs = []

    def make(**options):
        rigs.append(Rig(tmp_path / "file", **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make_rig):
    """One of them."""
    return make_rig()
