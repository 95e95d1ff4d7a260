"""Eviction policies as pure rules, and by name."""

import pytest

from headstart.errors import ConfigError
from headstart.policies import POLICIES, EvictionPolicy, FifoPolicy, LruPolicy, make_policy


def replay(policy, trace):
    """Order in which `policy` evicts the blocks of a trace of ("insert" | "hit", block)."""
    priorities = {}
    for clock, (what, block) in enumerate(trace, start=1):
        if what == "insert":
            priorities[block] = policy.on_insert(clock=clock, block_nbytes=4096)
        else:
            priorities[block] = policy.on_hit(
                priority=priorities[block], clock=clock, block_nbytes=4096
            )
    order = sorted(priorities, key=priorities.__getitem__)
    for block in order:
        policy.on_evict(priority=priorities[block])
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
    assert replay(make_policy(name), TRACE) == replay(policy, TRACE) == replay(policy, TRACE)
    priority = 0
    for clock in range(1, 100):
        risen = policy.on_hit(priority=priority, clock=clock, block_nbytes=1)
        assert priority <= risen < 2**63, "priorities only rise"
        priority = risen


def test_each_index_gets_a_policy_of_its_own():
    assert make_policy("lru") is not make_policy("lru")


@pytest.mark.parametrize("name", ["", "LRU", "arc", "lru "])
def test_an_unknown_policy_is_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError, match=r"is unknown; allowed: lru, fifo"):
        make_policy(name)
