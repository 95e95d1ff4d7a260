"""Eviction policies by name, and what all of them promise."""

import numpy as np
import pytest

from headstart.errors import ConfigError
from headstart.policies import (
    POLICIES,
    EvictionPolicy,
    FifoPolicy,
    LruPolicy,
    Sectioned,
    Watching,
    make_policy,
)
from headstart.policies.base import CLOCK_BITS, CLOCK_MASK, as_clocks, pack


class Roots:
    """Blocks without parents or children; a row is a letter's number."""

    def __init__(self):
        self.held = set()

    def __len__(self):
        return len(self.held)

    def key(self, row):
        return row

    def parent(self, row):
        return None

    def tokens(self, row):
        return 16


def replay(policy, trace):
    """Order in which `policy` evicts the blocks of a trace of ("insert" | "hit", block)."""
    priorities, blocks = {}, Roots()
    if isinstance(policy, Watching):
        policy.watch(blocks)
    for clock, (what, block) in enumerate(trace, start=1):
        row = ord(block)
        if what == "insert":
            blocks.held.add(row)
            priorities[row] = policy.on_insert(row=row, clock=clock)
        else:
            risen = policy.on_hit(row=row, priority=priorities[row], clock=clock)
            assert priorities[row] <= risen < 2**63, "priorities only rise"
            priorities[row] = risen
    order = []
    while priorities:
        row = min(priorities, key=priorities.__getitem__)
        if isinstance(policy, Sectioned):
            first = policy.first_section()
            of_section = [each for each in priorities if policy.section(each) == first]
            row = min(of_section or priorities, key=priorities.__getitem__)
            spared = policy.spare(row=row, priority=priorities[row])
            if spared is not None:
                assert spared >= priorities[row]
                priorities[row] = spared
                continue
        priority = priorities.pop(row)
        if isinstance(policy, Watching):
            policy.on_remove(row=row, priority=priority, evicted=True)
        blocks.held.discard(row)
        order.append(chr(row))
    return order


TRACE = [("insert", "a"), ("insert", "b"), ("insert", "c"), ("hit", "a"), ("hit", "b")]


def test_lru_evicts_what_was_used_longest_ago():
    assert replay(LruPolicy(), TRACE) == ["c", "a", "b"]


def test_fifo_evicts_what_was_stored_first():
    assert replay(FifoPolicy(), TRACE) == ["a", "b", "c"]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_is_deterministic_and_keeps_to_the_protocol(name):
    policy: EvictionPolicy = make_policy(name)
    assert policy.name == name
    longer = [*TRACE, *[("hit", "b")] * 100, ("insert", "d"), ("hit", "d")]
    assert replay(make_policy(name), longer) == replay(make_policy(name), longer)
    assert sorted(replay(make_policy(name), longer)) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_what_a_policy_was_never_told_of_goes_by_its_clock(name):
    """After a restart: rows with clocks, in section 0, that can be hit and evicted."""
    policy = make_policy(name)
    blocks = Roots()
    blocks.held = {1, 2, 3}
    if isinstance(policy, Watching):
        policy.watch(blocks)
    if isinstance(policy, Sectioned):
        assert [policy.section(row) for row in blocks.held] == [0, 0, 0]
        assert policy.first_section() == 0
        assert policy.spare(row=1, priority=10) is None
    assert policy.on_hit(row=2, priority=20, clock=31) >= 20
    if isinstance(policy, Watching):
        policy.on_remove(row=1, priority=10, evicted=True)
    blocks.held.remove(1)
    assert policy.on_insert(row=1, clock=32) > 30, "what is new comes after them"


def test_each_index_gets_a_policy_of_its_own():
    assert make_policy("lru") is not make_policy("lru")


@pytest.mark.parametrize("name", ["", "LRU", "arc", "lru ", "=", "lfu", 3, None, [1]])
def test_an_unknown_policy_is_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError, match=r"is unknown; allowed: lru, fifo, lfu-da, s3fifo, ttl"):
        make_policy(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lru=5", r"lru has nothing to set; allowed are .*ttl=10min"),
        ("s3fifo=", "s3fifo has nothing to set"),
        ("ttl=", "is not a quantity"),
        ("ttl=-3s", "is not a quantity"),
        ("ttl=0", "above 0"),
        ("ttl=3 weeks", "unit 'weeks'"),
        ("tlru=0", "at least 1"),
        ("tlru=1.5", "'1.5' is not a number of tokens"),
        ("tlru=10min", "not a number of tokens"),
        ("cost=", "not a number of tokens"),
        ("cost=0", "at least 1"),
        ("cost=٣", "not a number of tokens"),
    ],
)
def test_a_wrong_number_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        make_policy(text)


@pytest.mark.parametrize("text", ["ttl=10min", "ttl=250ms", "tlru=4096", "cost=30000"])
def test_a_number_is_taken(text):
    assert make_policy(text).name == text.partition("=")[0]


def test_packed_priorities_stop_where_the_room_ends():
    highest = (1 << 63 - CLOCK_BITS) - 1
    assert pack(0, 7) == 7
    assert pack(3, 7) == 3 << CLOCK_BITS | 7
    assert pack(1, CLOCK_MASK + 5) == pack(1, CLOCK_MASK) < pack(2, 0)
    assert pack(highest, CLOCK_MASK) == pack(highest + 9, CLOCK_MASK + 9) == 2**63 - 1
    assert pack(highest + 9, 5) < pack(highest + 1, 6), "then it is lru"


def test_priorities_become_clocks_in_the_same_order():
    clocks = np.array([5, 2, 9], np.uint64)
    assert as_clocks(clocks, 9) is clocks
    packed = np.array([pack(4, 1), pack(0, 7), 2**63 - 1, pack(4, 1), 0], np.uint64)
    assert as_clocks(packed, 9).tolist() == [3, 2, 4, 3, 1]
    assert as_clocks(packed, 9).dtype == np.uint64
    assert as_clocks(np.zeros(0, np.uint64), 0).tolist() == []
