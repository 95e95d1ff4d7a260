"""Two tiers replayed hit, and write, what a `PrefixStore` does on the same requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.policies import POLICIES
from headstart.store import PrefixStore
from headstart.testing import BLOCK_NBYTES, DictTier
from headstart.tiers import FileTier, FileTierOptions, MemoryTier
from headstart.transfer import Transfer
from headstart.tuner.tiers import TierSetup, simulate_tiers
from tier_cases import of_paths
from tuner_cases import SIZE, chats, prompts, recorded

LAYOUT = BlockLayout(block_size=SIZE, axes="byte", shape=(BLOCK_NBYTES,), dtype="uint8")
NAMESPACE = Namespace(model="tiers", weights="none", layout=LAYOUT)
SLOT = 4096 + BLOCK_NBYTES
SOON = 10.0
DATA = bytes(BLOCK_NBYTES)
PATHS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=14)


def asked(memory_blocks, lower, paths, policy="lru"):
    """What the store hits in memory and below, for each prompt in turn, and what it writes."""
    memory = MemoryTier(
        capacity_nbytes=memory_blocks * BLOCK_NBYTES, slab_nbytes=BLOCK_NBYTES, policy=policy
    )
    found = []
    with PrefixStore(memory, [(lower, Transfer("test", num_threads=1))]) as store:
        store.open_namespace(NAMESPACE)
        for path in paths:
            chain = keys_from_hashes(NAMESPACE, [content.encode() for content in path])
            with store.load(chain) as lease:
                found.append((lease.by_tier["memory"], lease.by_tier.get(lower.name, 0)))
                rest = chain.run(lease.ready_blocks, len(chain))
                store.store(rest, [DATA] * len(rest))
            assert store.flush(SOON)
        return found, lower.stats().num_stored


def replayed(memory_blocks, file_blocks, paths, policy="lru"):
    setup = TierSetup(memory_blocks=memory_blocks, file_blocks=file_blocks, policy=policy)
    found = simulate_tiers(of_paths(paths), setup)
    hits = zip(found.memory_hits.tolist(), found.file_hits.tolist(), strict=True)
    return list(hits), found.written_blocks


@given(st.integers(1, 9), st.integers(1, 12), PATHS)
def test_through_is_what_the_store_does(memory_blocks, file_blocks, paths):
    lower = DictTier(capacity_nbytes=file_blocks * BLOCK_NBYTES)
    assert asked(memory_blocks, lower, paths) == replayed(memory_blocks, file_blocks, paths)


def files_of(folder, file_blocks, policy):
    options = FileTierOptions(
        root=folder / f"{file_blocks}",
        capacity_nbytes=file_blocks * SLOT,
        slab_nbytes=SLOT,
        durable=False,
        policy=policy,
    )
    return FileTier(options)


NUMBERED = ("tlru=8", "cost=4")
"""With numbers that matter in prompts of a few blocks of four tokens."""


@pytest.mark.parametrize("policy", [*POLICIES, *NUMBERED])
def test_through_is_what_the_store_does_with_files(tmp_path, policy):
    words = ("abcab", "abcb", "b", "bab", "abca", "cc", "ccba", "abcab", "bab", "cab", "abcbb")
    paths = [word[: 1 + number % 5] for number in range(3) for word in words] * 2
    for memory_blocks, file_blocks in ((5, 3), (5, 9), (7, 14)):
        found = asked(memory_blocks, files_of(tmp_path, file_blocks, policy), paths, policy)
        assert found == replayed(memory_blocks, file_blocks, paths, policy)


@pytest.mark.parametrize("policy", [*POLICIES, *NUMBERED])
def test_through_is_what_the_store_does_with_chats(tmp_path, policy):
    trace = recorded(tmp_path, chats(1, num_requests=110))
    paths = [[f"{block}" for block in blocks] for blocks in prompts(trace)]
    found = asked(8, files_of(tmp_path, 40, policy), paths, policy)
    assert found == replayed(8, 40, paths, policy)
    memory, files = map(sum, zip(*found[0], strict=True))
    assert min(memory, files) > 30, "both tiers serve"


def test_the_policies_differ():
    """Else the tests above compare `lru` with itself."""
    words = ("abcab", "abcb", "b", "bab", "abca", "cc", "ccba", "abcab", "bab", "cab", "abcbb")
    names = ("lru", "fifo", "lfu-da", "s3fifo", *NUMBERED)
    found = [replayed(5, 9, words * 3, policy) for policy in names]
    assert all(found.count(each) == 1 for each in found)
