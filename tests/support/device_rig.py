"""A tier of which each I/O takes the time that a test says, under a store, and its device."""

from __future__ import annotations

import threading

from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.node.devices import Devices
from headstart.store import PrefixStore
from headstart.testing import CountingTier, Fault, FaultyTier
from headstart.tiers import FileTier, FileTierOptions, MemoryTier
from headstart.transfer import Transfer
from node_process import SOON, wait_for

BLOCK = 64 << 10
LAYOUT = BlockLayout(block_size=16, axes="byte", shape=(BLOCK,), dtype="uint8")
NAMESPACE = Namespace(model="devices", weights="none", layout=LAYOUT)
FAST, SLOW = Fault(latency_s=0.001), Fault(latency_s=0.05)
BAD = Fault(latency_s=0.001, fails=True)


def chain(path):
    return keys_from_hashes(NAMESPACE, [str(content).encode() for content in path])


class Clock:
    """Goes on when it is told to."""

    def __init__(self):
        self.now = 1000.0
        self._lock = threading.Lock()

    def __call__(self):
        return self.now

    def skip(self, seconds):
        with self._lock:
            self.now += seconds


class Rig:
    """A store above a file tier that reads a block after the other, and its device."""

    def __init__(self, root, *, is_known=True, num_threads=1):
        self.clock = Clock()
        self.memory = MemoryTier(
            capacity_nbytes=32 * BLOCK, slab_nbytes=8 * BLOCK, huge_pages=False
        )
        self.file = FileTier(FileTierOptions(root=root, capacity_nbytes=256 * BLOCK, durable=False))
        self.slow = FaultyTier(self.file, lambda number: FAST, sleep=self.clock.skip)
        self.counted = CountingTier(self.slow)
        self.transfer = Transfer(
            "test", num_threads=num_threads, inflight_nbytes=BLOCK, clock=self.clock
        )
        self.store = PrefixStore(self.memory, [(self.counted, self.transfer)])
        if is_known:
            self.store.open_namespace(NAMESPACE)
        self.devices = Devices(self.store.lower, tick_s=None, clock=self.clock)
        self.device = self.devices.by_tier["file"]

    @property
    def state(self):
        return self.device.state()

    def put(self, *paths):
        for path in paths:
            self.store.store(chain(path), [key * (BLOCK // 32) for key in chain(path)])
        assert self.store.flush(SOON)

    def read(self, path):
        """A request reads all of a path; the blocks that it gets."""
        self.memory.discard_namespace(NAMESPACE.id)
        with self.store.load(chain(path), timeout_s=SOON) as lease:
            return lease.ready_blocks

    def teach(self, fault=FAST, path="abcd"):
        """Four reads of a path, each block with this fault."""
        self.put(path)
        self.io(fault)
        for _ in range(4):
            assert self.read(path) == len(path)
        assert not self.device.is_open

    def io(self, fault):
        self.slow.schedule = lambda number: fault

    def tick(self, after_s=0.0):
        """Let time pass, look after the device, wait for its probe; how many it made."""
        self.clock.skip(after_s)
        before = self.state.num_probes
        self.device.tick()
        self.settle()
        return self.state.num_probes - before

    def settle(self):
        """Wait until nothing is read."""
        wait_for(lambda: not (self.transfer._unfinished or self.device._is_probing))

    def close(self):
        self.slow.resume()
        self.devices.close()
        self.store.close()
