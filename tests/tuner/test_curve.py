"""The one-pass curve: equal, block by block, to simulations with the store's policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.tuner.curve import NEVER, count_smaller_before, depths, last_use, lru_curve
from headstart.tuner.simulate import rates, simulate
from tuner_cases import chats, recorded


@given(st.lists(st.integers(0, 9), max_size=70))
def test_the_last_use_is_the_last(stream):
    expected = [
        max((j for j in range(i) if stream[j] == stream[i]), default=-1) for i in range(len(stream))
    ]
    assert last_use(np.array(stream, np.int32)).tolist() == expected


@given(st.integers(0, 70).flatmap(lambda n: st.permutations(range(n))))
def test_smaller_ones_before_are_counted(values):
    expected = [sum(other < value for other in values[:i]) for i, value in enumerate(values)]
    order = np.argsort(np.array(values, np.int64))
    assert count_smaller_before(order).tolist() == expected


@pytest.mark.parametrize("seed", range(12))
def test_every_capacity_is_what_a_simulation_finds(tmp_path, seed):
    trace = recorded(tmp_path, chats(seed))
    found = depths(trace)
    first = len(trace) // 2
    cold, late = lru_curve(trace, found), lru_curve(trace, found, first)
    for capacity in range(cold.enough_blocks + 3):
        hits = simulate(trace, "lru", capacity)
        assert hits.tolist() == [
            int((found[start:end] <= capacity).sum())
            for start, end in zip(trace.starts[:-1], trace.starts[1:], strict=True)
        ]
        for curve, start in ((cold, 0), (late, first)):
            simulated = rates(trace, hits, start)
            assert curve.at(capacity).block_hit == pytest.approx(simulated.block_hit, abs=1e-12)
            assert curve.at(capacity).token_hit == pytest.approx(simulated.token_hit, abs=1e-12)
    assert cold.at(0).token_hit == 0.0
    assert cold.infinite == cold.at(cold.enough_blocks) != cold.at(cold.enough_blocks - 1)


@pytest.mark.parametrize("seed", range(4))
def test_hits_are_prefixes(tmp_path, seed):
    trace = recorded(tmp_path, chats(seed))
    found = depths(trace)
    for start, end in zip(trace.starts[:-1], trace.starts[1:], strict=True):
        known = [depth for depth in found[start:end].tolist() if depth != NEVER]
        assert known == sorted(set(known)), "a child lies deeper than its parent"
        assert (found[start + len(known) : end] == NEVER).all()


def test_a_trace_without_blocks_has_a_curve(tmp_path):
    trace = recorded(tmp_path, [{"timestamp": 0, "input_length": 3, "output_length": 1}])
    curve = lru_curve(trace, depths(trace))
    assert (curve.num_blocks, curve.num_tokens, curve.infinite.token_hit) == (0, 3, 0.0)
