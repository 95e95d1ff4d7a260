"""What tiers hold, also where engines and node start anew in between."""

from __future__ import annotations

from headstart.tuner.held import InclusiveTiers, RestartedTiers
from tier_cases import of_paths
from tuner_cases import chats, recorded


def held(tiers, trace, *capacities, policy="lru"):
    return [each.tolist() for each in tiers(trace, policy, capacities)]


def test_files_stay_over_a_restart_and_memory_does_not():
    trace = of_paths(["ab", "ab", "c", "ab", "ab", "c"])
    assert held(InclusiveTiers(), trace, 9, 9) == [[0, 2, 0, 2, 2, 1]] * 2
    assert held(RestartedTiers([3]), trace, 9, 9) == [[0, 2, 0, 0, 2, 0], [0, 2, 0, 2, 2, 1]]
    assert held(RestartedTiers([1, 3]), trace, 9) == [[0, 0, 0, 0, 2, 0]]
    assert held(RestartedTiers([3]), trace) == []


def test_without_restarts_nothing_changes(tmp_path):
    trace = recorded(tmp_path, chats(3))
    for policy in ("lru", "s3fifo"):
        plain = held(InclusiveTiers(), trace, 5, 20, policy=policy)
        assert held(RestartedTiers([]), trace, 5, 20, policy=policy) == plain


def test_a_life_is_a_trace_of_its_own(tmp_path):
    trace = recorded(tmp_path, chats(4))
    number = 50
    late = trace.chosen([each >= number for each in range(len(trace))])
    for policy in ("lru", "cost=4"):
        found = held(RestartedTiers([number]), trace, 20, policy=policy)[0]
        assert found[:number] == held(InclusiveTiers(), trace, 20, policy=policy)[0][:number]
        assert found[number:] == held(InclusiveTiers(), late, 20, policy=policy)[0]
