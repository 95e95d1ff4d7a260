"""A store whose tiers the tests can reach, stall, break and check."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from headstart.keys import keys_from_hashes
from headstart.store import PrefixStore
from headstart.testing import BLOCK_NBYTES, FaultyTier, kit_namespace
from headstart.testing.ledger import payload
from headstart.tiers import FileTier, FileTierOptions, MemoryTier
from headstart.transfer import Transfer
from headstart.types import Outcome

DONE = Outcome.DONE
SOON = 10.0
SLOT = 4096 + BLOCK_NBYTES
NAMESPACE = kit_namespace()


def chain(path, namespace=NAMESPACE):
    return keys_from_hashes(namespace, [content.encode() for content in path])


def blocks_of(run):
    return [payload(run.namespace, key, 0, run.block_nbytes) for key in run]


class World:
    """A store with its tiers in reach, and checks of what it says."""

    def __init__(self, root, *, memory_blocks=16, file_blocks=64, num_files=1, queue_blocks=None):
        self.memory = MemoryTier(
            capacity_nbytes=memory_blocks * BLOCK_NBYTES, slab_nbytes=4 * BLOCK_NBYTES
        )
        self.files = [
            FileTier(
                FileTierOptions(
                    root=root / f"file{number}",
                    name=f"file{number}",
                    capacity_nbytes=file_blocks * SLOT,
                    slab_nbytes=4 * SLOT,
                    durable=False,
                )
            )
            for number in range(num_files)
        ]
        self.faulty = [FaultyTier(file) for file in self.files]
        # As `open_store` does: what is queued pins at most half of the memory.
        queue_nbytes = (queue_blocks or memory_blocks // 2) * BLOCK_NBYTES
        self.transfers = [
            Transfer(f"test{number}", num_threads=4, max_queued_nbytes=queue_nbytes)
            for number in range(num_files)
        ]
        self.store = PrefixStore(self.memory, list(zip(self.faulty, self.transfers, strict=True)))
        self.store.open_namespace(NAMESPACE)
        self.flowing = True

    def stall(self):
        """Let the first file tier stand still from now on."""
        self.flowing = False
        self.slow.stall()

    @property
    def file(self):
        return self.files[0]

    @property
    def slow(self):
        return self.faulty[0]

    def put(self, path, start=0):
        """Store `path` from block `start` on; it must be taken. Then memory has room again."""
        run = chain(path).run(start, len(path))
        assert self.store.store(run, blocks_of(run)) == [DONE] * len(run)
        if self.flowing:
            assert self.store.flush(SOON)

    def forget_memory(self):
        assert self.store.flush(SOON)
        self.memory.discard_namespace(NAMESPACE.id)

    def check(self, lease):
        """The lease's views are exactly the blocks, read-only."""
        run = lease.chain.run(0, lease.ready_blocks)
        assert [bytes(view) for view in lease.views] == blocks_of(run)
        assert all(view.readonly and len(view) == BLOCK_NBYTES for view in lease.views)

    def get(self, path, **options):
        """Blocks that a load of `path` brings, after checking them."""
        with self.store.load(chain(path), **options) as lease:
            self.check(lease)
            return lease.ready_blocks

    @staticmethod
    def wait_for(condition):
        """Wait until a condition holds; fail when it does not come to pass."""
        deadline = time.monotonic() + SOON
        while not condition():
            assert time.monotonic() < deadline, "it never came to pass"
            time.sleep(0.001)

    def settled(self):
        """Nothing is queued, reserved or pinned any more."""
        for faulty in self.faulty:
            faulty.resume()
        assert self.store.flush(SOON)
        for tier in (self.memory, *self.files):
            self.wait_for(lambda tier=tier: not tier.index._reserved)
            assert not tier.index.rows.column("pins").any(), f"{tier.name} has pins left"
            tier.check_invariants()


@pytest.fixture
def make():
    """Makes worlds over one folder, in memory where the machine allows it: nothing here is slow."""
    worlds = []
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.TemporaryDirectory(prefix="headstart-", dir=memory)

    def make(**options):
        worlds.append(World(Path(folder.name), **options))
        return worlds[-1]

    with folder:
        yield make
        for world in worlds:
            if not world.store._closed:
                world.settled()
                world.store.close()


@pytest.fixture
def world(make):
    return make()
