"""Policies replayed: the bound is one, simple cases by hand, and what is refused."""

from __future__ import annotations

from itertools import combinations

import pytest

from headstart.errors import ConfigError
from headstart.tuner.recorded import NO_PARENT
from headstart.tuner.simulate import names, rates, simulate
from tuner_cases import SIZE, chats, prompts, recorded


def lines(*requests):
    return [
        {
            "timestamp": number,
            "input_length": len(ids) * SIZE,
            "output_length": 1,
            "hash_ids": list(ids),
        }
        for number, ids in enumerate(requests)
    ]


def hits(tmp_path, name, capacity, *requests):
    return simulate(recorded(tmp_path, lines(*requests)), name, capacity).tolist()


@pytest.mark.parametrize("seed", range(8))
def test_nothing_hits_more_blocks_than_the_optimum(tmp_path, seed):
    trace = recorded(tmp_path, chats(seed))
    for capacity in (0, 1, 2, 4, 7, 12, 20, 40, 300):
        found = {name: rates(trace, simulate(trace, name, capacity)) for name in names()}
        best = found.pop("optimal").block_hit
        assert best >= max(each.block_hit for each in found.values())
        for name in ("ttl=30ms", "ttl=1h", "tlru=8", "tlru=100", "cost=4", "cost=100"):
            assert best >= rates(trace, simulate(trace, name, capacity)).block_hit
        if capacity == 300:
            assert {each.block_hit for each in found.values()} == {best}, "all have what there is"
    some = simulate(trace, "optimal", 7).sum()
    assert some > simulate(trace, "lru", 7).sum(), "the future is worth something"


def most_hits(trace, capacity):
    """The best choice of what to keep, by trying all."""
    states = {frozenset(): 0}
    for blocks in prompts(trace):
        after = {}
        for held, count in states.items():
            hit = next((i for i, block in enumerate(blocks) if block not in held), len(blocks))
            known = held | set(blocks)
            for number in range(min(capacity, len(known)) + 1):
                for kept in map(frozenset, combinations(sorted(known), number)):
                    parents = {int(trace.parent[block]) for block in kept} - {NO_PARENT}
                    if parents <= kept:
                        after[kept] = max(after.get(kept, 0), count + hit)
        states = after
    return max(states.values())


@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_is_the_best_of_all_choices(tmp_path, seed):
    trace = recorded(tmp_path, chats(seed, num_requests=9))
    for capacity in (1, 2, 3):
        assert simulate(trace, "optimal", capacity).sum() == most_hits(trace, capacity)


def test_lru_and_fifo_differ_in_what_a_hit_does(tmp_path):
    asked = ([1], [2], [1], [3], [1], [2])
    assert hits(tmp_path, "lru", 2, *asked) == [0, 0, 1, 0, 1, 0]
    assert hits(tmp_path, "fifo", 2, *asked) == [0, 0, 1, 0, 0, 0]


def test_children_go_before_their_parents(tmp_path):
    for name in set(names()) - {"optimal"}:
        assert hits(tmp_path, name, 3, [1, 2, 3], [4], [1, 2, 3]) == [0, 0, 2]


def test_lfu_keeps_what_was_popular(tmp_path):
    asked = ([1], [1], [2], [3], [2], [1])
    assert hits(tmp_path, "lfu", 2, *asked) == [0, 1, 0, 0, 0, 1]
    assert hits(tmp_path, "lru", 2, *asked) == [0, 1, 0, 0, 1, 0]


def lfu_hits(trace, capacity):
    """What is held with its hits and its last use, and the least of the leaves looked for."""
    held, found = {}, []
    for number, blocks in enumerate(prompts(trace)):
        hit = next((i for i, block in enumerate(blocks) if block not in held), len(blocks))
        for block in blocks[:hit]:
            held[block] = (held[block][0] + 1, number)
        new, found = blocks[hit:], [*found, hit]
        while new and len(held) + len(new) > capacity:
            stays = {int(trace.parent[block]) for block in held} | set(blocks[:hit])
            leaves = [block for block in held if block not in stays]
            if not leaves:
                break
            del held[min(leaves, key=held.__getitem__)]
        held |= dict.fromkeys(new[: capacity - len(held)], (0, number))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_lfu_forgets_the_hits_of_what_has_gone(tmp_path, seed):
    trace = recorded(tmp_path, chats(seed, num_requests=150))
    for capacity in (3, 8, 20):
        assert simulate(trace, "lfu", capacity).tolist() == lfu_hits(trace, capacity)


def test_sieve_passes_a_marked_block_once(tmp_path):
    # 1 is marked, so 2 goes for 3; the hand stays behind 1, and 3 goes for 4, then 1 for 5.
    asked = ([1], [2], [1], [3], [1], [4], [1], [5], [4])
    assert hits(tmp_path, "sieve", 2, *asked) == [0, 0, 1, 0, 1, 0, 1, 0, 0]


@pytest.mark.parametrize("name", names())
def test_a_prompt_longer_than_the_cache_keeps_its_beginning(tmp_path, name):
    assert hits(tmp_path, name, 2, [1, 2, 3, 4], [1, 2, 3, 4]) == [0, 2]
    assert hits(tmp_path, name, 0, [1], [1]) == [0, 0]


def test_progress_is_told(tmp_path):
    trace = recorded(tmp_path, chats(0))
    for name in names():
        told = []
        simulate(trace, name, 5, told.append)
        assert told == [0]


def test_what_cannot_be_simulated_is_refused(tmp_path):
    trace = recorded(tmp_path, lines([1]))
    with pytest.raises(ConfigError, match=r"'arc' is unknown; known: lru, fifo, lfu-da, .*sieve"):
        simulate(trace, "arc", 1)
    with pytest.raises(ConfigError, match="lru has nothing to set"):
        simulate(trace, "lru=3", 1)
    with pytest.raises(ConfigError, match="below none"):
        simulate(trace, "lru", -1)
