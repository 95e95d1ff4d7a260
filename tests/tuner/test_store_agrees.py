"""The store itself, in real memory and in a real folder, hits what the simulator says of a trace.

Half a point is allowed. One tier agrees exactly so far; of two, each forgets by itself, and under
`fifo` a block that is promoted is new in memory when the file tier forgets it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.store import PrefixStore
from headstart.tiers import FileTier, FileTierOptions, MemoryTier
from headstart.transfer import Transfer
from headstart.tuner.facts import infinite
from headstart.tuner.recorded import record
from headstart.tuner.simulate import rates, simulate
from tuner_cases import many_chats, prompts, recorded

BLOCK = 4096
SLOT = 2 * BLOCK
"""With its header."""
SLAB_BLOCKS = 8
LAYOUT = BlockLayout(block_size=1, axes="byte", shape=(BLOCK,), dtype="uint8")
NAMESPACE = Namespace(model="agrees", weights="none", layout=LAYOUT)
TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"
HALF_A_POINT = 0.005
SOON = 20.0


class Driven:
    """A store of so many blocks in memory and on the disk, asked request by request.

    Without memory of its own, what it needs to pass blocks on is forgotten after each request.
    """

    def __init__(self, folder, policy, *, memory_blocks, file_blocks, room_blocks):
        self._has_memory = memory_blocks > 0
        self._memory = MemoryTier(
            capacity_nbytes=(memory_blocks or room_blocks) * BLOCK,
            policy=policy,
            slab_nbytes=SLAB_BLOCKS * BLOCK,
            huge_pages=False,
        )
        lower = []
        if file_blocks:
            options = FileTierOptions(
                root=folder / "file",
                capacity_nbytes=file_blocks * SLOT,
                slab_nbytes=SLAB_BLOCKS * SLOT,
                policy=policy,
                durable=False,
            )
            lower = [(FileTier(options), Transfer("agrees", num_threads=2))]
        self.store = PrefixStore(self._memory, lower)
        self.store.open_namespace(NAMESPACE)

    def hits(self, trace):
        """Blocks of each request that are hits."""
        return np.array([self._ask(blocks) for blocks in prompts(trace)])

    def _ask(self, blocks):
        if not blocks:
            return 0
        chain = keys_from_hashes(NAMESPACE, [str(block).encode() for block in blocks])
        contents = [key * (BLOCK // len(key)) for key in chain]
        with self.store.load(chain) as lease:
            held = lease.ready_blocks
            assert [bytes(view) for view in lease.views] == contents[:held]
        self.store.store(chain, contents)
        assert self.store.flush(SOON)
        if not self._has_memory:
            self._memory.discard_namespace(NAMESPACE.id)
        return held


def hit_rates(tmp_path, trace, policy, *, memory_blocks=0, file_blocks=0):
    """Shares of the tokens that the store hits, and that the simulator says."""
    most = 2 * SLAB_BLOCKS * -(-int(trace.lengths.max()) // SLAB_BLOCKS)
    assert not memory_blocks or memory_blocks >= most, "a prompt passes through memory"
    driven = Driven(
        tmp_path, policy, memory_blocks=memory_blocks, file_blocks=file_blocks, room_blocks=most
    )
    with driven.store:
        found = rates(trace, driven.hits(trace)).token_hit
    capacity = max(memory_blocks, file_blocks)  # what memory holds the file tier holds, too
    return found, rates(trace, simulate(trace, policy, capacity)).token_hit


TIERS = {"memory": (1, 0), "file": (0, 1), "both": (1, 2)}
"""Shares of the capacity that is tried."""


def check(tmp_path, trace, policy, tiers, capacity_blocks):
    """The store agrees, at a capacity where some of what could be hit is."""
    memory, file = TIERS[tiers]
    found, said = hit_rates(
        tmp_path,
        trace,
        policy,
        memory_blocks=memory * capacity_blocks,
        file_blocks=file * capacity_blocks,
    )
    most = infinite(trace).tokens_cold
    assert found == pytest.approx(said, abs=HALF_A_POINT)
    assert 0.2 * most < said < most


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_a_made_trace(tmp_path, policy, tiers):
    trace = recorded(tmp_path, many_chats(5, 50))
    check(tmp_path, trace, policy, tiers, capacity_blocks=64)


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_some_sessions_of_a_public_trace(tmp_path, policy, tiers):
    path = TRACES / "mooncake_conversation_trace.jsonl.gz"
    if not path.exists():
        pytest.skip(f"the public trace is not there: {path}")
    check(tmp_path, some_of(path), policy, tiers, capacity_blocks=288)


@cache
def some_of(path):
    """About 140 requests, in whole sessions."""
    return replace(record(path, share=0.01, seed=0), share=1.0)
