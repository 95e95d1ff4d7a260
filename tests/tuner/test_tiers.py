"""Two tiers replayed: as a model in few words, as one tier, as the curve, and what must hold."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from headstart.errors import ConfigError
from headstart.policies import POLICIES
from headstart.tuner.curve import depths
from headstart.tuner.simulate import simulate
from headstart.tuner.tiers import CAUSES, WRITES, TierSetup, simulate_tiers
from tier_cases import Model, of_paths
from tuner_cases import chats, recorded

ALL = 10_000
"""Blocks that no trace here has."""
EVERY = (*POLICIES, "ttl=30ms", "tlru=8", "cost=4")


def replay(trace, memory, files, write="through", **options):
    setup = TierSetup(memory_blocks=memory, file_blocks=files, write=write, **options)
    return simulate_tiers(trace, setup)


def every_way(trace, memory, files, **options):
    for write in WRITES:
        yield replay(trace, memory, files, write, **options)
    yield replay(trace, memory, files, "on-evict", inclusive=False, **options)


@pytest.mark.parametrize("seed", range(40))
def test_all_is_as_the_model_says(tmp_path, seed):
    rng = random.Random(seed)
    trace = recorded(tmp_path, chats(seed, num_requests=60))
    for write in WRITES:
        setup = TierSetup(
            memory_blocks=rng.choice((0, 1, 4, 9, 16, 30)),
            file_blocks=rng.choice((0, 1, 5, 12, 30, 60, ALL)),
            policy=rng.choice(("lru", "fifo")),
            write=write,
            inclusive=write != "on-evict" or rng.random() < 0.5,
            ttl_s=rng.choice((None, None, 0.055, 0.205)),
            engines=rng.choice((1, 1, 2, 3)),
        )
        found, model = simulate_tiers(trace, setup), Model(trace, setup)
        hits = list(zip(found.memory_hits.tolist(), found.file_hits.tolist(), strict=True))
        assert hits == model.hits, setup
        assert found.written_by_cause == dict.fromkeys(CAUSES, 0) | model.causes, setup
        assert found.rewritten_blocks == len(model.log) - len(set(model.log))
        assert found.read_blocks == sum(files for _, files in model.hits)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_memory_hits_what_it_would_hit_alone(tmp_path, seed, policy):
    trace = recorded(tmp_path, chats(seed))
    for capacity in (0, 1, 5, 20, ALL):
        alone = simulate(trace, policy, capacity).tolist()
        for files in (0, 7, 40, ALL):
            for result in every_way(trace, capacity, files, policy=policy):
                assert result.memory_hits.tolist() == alone
        for result in every_way(trace, capacity, 0, policy=policy):
            assert (result.hits.tolist(), result.written_blocks) == (alone, 0)


@pytest.mark.parametrize("policy", EVERY)
def test_without_memory_files_hit_what_one_tier_hits(tmp_path, policy):
    trace = recorded(tmp_path, chats(1))
    for capacity in (0, 1, 5, 20, ALL):
        for write in ("through", "on-evict"):
            result = replay(trace, 0, capacity, write, policy=policy)
            assert result.file_hits.tolist() == simulate(trace, policy, capacity).tolist()
            assert result.written_by_cause["new"] == result.written_blocks


@pytest.mark.parametrize("seed", range(3))
def test_lru_through_has_the_curve_of_each_and_exclusive_of_their_sum(tmp_path, seed):
    trace = recorded(tmp_path, chats(seed))
    found, ends = depths(trace), trace.starts.tolist()

    def by_curve(capacity):
        pairs = itertools.pairwise(ends)
        return np.array([int((found[start:end] <= capacity).sum()) for start, end in pairs])

    for memory in (int(trace.lengths.max()), 20, 50):
        for files in (0, 1, 5, 20, 45, 90, ALL):
            through = replay(trace, memory, files)
            assert (through.memory_hits == by_curve(memory)).all()
            assert (through.hits == by_curve(max(memory, files))).all()
            exclusive = replay(trace, memory, files, "on-evict", inclusive=False)
            assert (exclusive.hits == by_curve(memory + files)).all()


@pytest.mark.parametrize("policy", EVERY)
def test_the_optimum_of_both_capacities_is_not_beaten(tmp_path, policy):
    trace = recorded(tmp_path, chats(EVERY.index(policy)))
    for memory, files in ((1, 3), (4, 4), (10, 30), (30, 10)):
        for engines in (1, 3):
            best = simulate(trace, "optimal", engines * memory + files).sum()
            for result in every_way(trace, memory, files, engines=engines, policy=policy):
                assert result.hits.sum() <= best


@pytest.mark.parametrize("policy", POLICIES)
def test_files_that_hold_all_hit_all_whatever_the_policy(tmp_path, policy):
    trace = recorded(tmp_path, chats(5))
    most = simulate(trace, "lru", ALL).tolist()
    for memory in (int(trace.lengths.max()), 25):
        for options in ({}, {"write": "on-evict"}, {"write": "on-evict", "inclusive": False}):
            assert replay(trace, memory, ALL, policy=policy, **options).hits.tolist() == most
        assert replay(trace, memory, ALL, policy=policy, engines=3).hits.tolist() == most


@pytest.mark.parametrize("seed", range(4))
def test_files_that_hold_all_are_written_once_a_block(tmp_path, seed):
    trace = recorded(tmp_path, chats(seed))
    num_uses = np.bincount(trace.blocks)
    most = simulate(trace, "lru", ALL).tolist()
    for memory in (int(trace.lengths.max()), 25):
        through, on_evict, second = (replay(trace, memory, ALL, write) for write in WRITES)
        assert through.hits.tolist() == on_evict.hits.tolist() == most
        assert through.written_by_cause["new"] == through.written_blocks == (num_uses > 0).sum()
        assert second.written_blocks == (num_uses > 1).sum()
        assert second.hits.sum() <= through.hits.sum()
        assert 0 < on_evict.written_blocks <= through.written_blocks
        for result in (through, on_evict, second):
            assert result.rewritten_blocks == 0


@pytest.mark.parametrize("seed", range(4))
def test_on_evict_writes_no_more_than_memory_evicts_and_what_is_above(tmp_path, seed):
    trace = recorded(tmp_path, chats(seed))
    longest = int(trace.lengths.max())
    for memory in (longest, 30):
        for files in (longest, 30, ALL):
            found = replay(trace, memory, files, "on-evict", inclusive=False)
            taken = int((trace.lengths - found.memory_hits).sum())
            evicted = taken - min(memory, len(trace.parent))
            assert found.written_by_cause["evicted"] == found.written_blocks == evicted
            assert replay(trace, memory, files, "on-evict").written_by_cause["evicted"] <= evicted


def test_memory_that_holds_all_evicts_nothing(tmp_path):
    trace = recorded(tmp_path, chats(2))
    for result in every_way(trace, ALL, 50):
        assert result.read_blocks == 0
        assert result.setup.write != "on-evict" or result.written_blocks == 0


def test_through_writes_again_what_files_lost():
    # Files hold two blocks, memory three: 1 leaves the files for 3, and is back at its next use.
    found = replay(of_paths(["1", "2", "3", "1"]), 3, 2)
    assert found.memory_hits.tolist() == [0, 0, 0, 1]
    assert found.written_by_cause == dict.fromkeys(CAUSES, 0) | {"new": 3, "lost": 1}
    assert found.rewritten_blocks == 1


def test_on_evict_writes_what_is_above_too_unless_exclusive():
    # "c" is evicted for "x"; "a" and "b" stay in memory.
    trace = of_paths(["abc", "ab", "x", "abc"])
    found = replay(trace, 3, 9, "on-evict")
    assert (found.written_by_cause["evicted"], found.written_by_cause["above"]) == (1 + 1, 2)
    assert found.file_hits.tolist() == [0, 0, 0, 1]
    found = replay(trace, 3, 9, "on-evict", inclusive=False)
    assert found.written_by_cause == dict.fromkeys(CAUSES, 0) | {"evicted": 2}
    assert found.file_hits.tolist() == [0, 0, 0, 1]


def test_a_second_use_counts_although_memory_has_forgotten():
    found = replay(of_paths(["a", "b", "a", "b", "a"]), 1, 9, "second-touch")
    assert found.written_by_cause["used again"] == 2
    assert found.file_hits.tolist() == [0, 0, 0, 0, 1]


def test_what_is_unused_for_the_ttl_is_gone(tmp_path):
    trace = of_paths(["a", "a", "b", "b", "b", "b", "a"])  # 10 ms apart
    assert replay(trace, 9, 9, ttl_s=0.051).hits.tolist() == [0, 1, 0, 1, 1, 1, 1]
    found = replay(trace, 9, 9, ttl_s=0.049)
    assert found.hits.tolist() == [0, 1, 0, 1, 1, 1, 0]
    assert found.rewritten_blocks == 1


def test_engines_share_files_and_no_memory():
    trace = of_paths(["ax", "by", "az", "bz"])
    engine = trace.session % 2
    assert len(set(engine.tolist())) == 2, "the sessions are dealt to both"
    found = replay(of_paths(["a", "b", "a", "b"]), 9, 9, engines=2)
    assert found.memory_hits.tolist() == [0, 0, 1, 1]
    rows = [["s", "a"], ["s", "b"], ["s", "c"], ["s", "d"]] * 6
    many = [["s", f"{number}"] for number in range(24)]  # more children than a session has
    for paths in (rows, many):
        trace = of_paths(paths)
        one, two = replay(trace, 99, 99), replay(trace, 99, 99, engines=2)
        assert one.hits.tolist() == two.hits.tolist()
        assert one.written_blocks == two.written_blocks == len(trace.parent)
    assert one.read_blocks == 0
    assert two.read_blocks == 1, "`s` is promoted to the second engine's memory"


def test_a_prompt_without_blocks_hits_none():
    for result in every_way(of_paths(["", "ab", "", "ab"]), 9, 9, ttl_s=1.0):
        assert result.hits.tolist() == [0, 0, 0, 2]


def test_progress_is_told(tmp_path):
    told = []
    setup = TierSetup(memory_blocks=1, file_blocks=1)
    simulate_tiers(recorded(tmp_path, chats(0)), setup, told.append)
    assert told == [0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"memory_blocks": -1}, "capacities of -1 and 1 blocks: none is below 0"),
        ({"policy": "optimal"}, "policy 'optimal' is unknown; allowed: lru, fifo, lfu-da, s3fifo"),
        ({"policy": "tlru=0"}, "tlru=0 must be a number of tokens of at least 1"),
        ({"write": "back"}, "policy 'back' is unknown; known: through, on-evict, second-touch"),
        ({"inclusive": False}, "exclusive tiers are written on-evict: through would"),
        ({"ttl_s": 0.0}, "a TTL is above 0 s, not 0.0; without one nothing expires"),
        ({"ttl_s": float("nan")}, "a TTL is above 0 s"),
        ({"engines": 0}, "0 engines cannot be simulated; 1 to 256 can"),
    ],
)
def test_what_cannot_be_simulated_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        TierSetup(**{"memory_blocks": 1, "file_blocks": 1} | wrong)
