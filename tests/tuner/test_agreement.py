"""The simulator and the store's index have the same hits, request by request, for every policy."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.policies import POLICIES
from headstart.tuner.simulate import simulate
from tuner_cases import SIZE, chats, hits_of_the_store, recorded

NUMBERED = ("ttl=30ms", "tlru=8", "tlru=4", "cost=4")
"""With numbers that matter in traces of seconds and prompts of a few blocks of four tokens."""

turns = st.tuples(
    st.integers(0, 40),  # the prompt it goes on from
    st.integers(0, 6),  # blocks of that it keeps
    st.integers(0, 4),  # new ones
    st.sampled_from([1, 1, 5, 40]),  # ms since the turn before
)


def rows_of(drawn):
    """A trace of these turns: prompts that branch, come back, and pause."""
    said, rows, at_ms, last = [[]], [], 0, 0
    for which, keep, new, pause in drawn:
        prompt = [*said[which % len(said)][:keep], *range(last + 1, last + 1 + new)]
        last += new
        at_ms += pause
        said.append(prompt)
        rows.append(
            {
                "timestamp": at_ms,
                "input_length": len(prompt) * SIZE + (not prompt),
                "output_length": 1,
                "hash_ids": prompt,
            }
        )
    return rows


@pytest.mark.parametrize("name", [*POLICIES, *NUMBERED])
def test_on_chats(tmp_path, name):
    for seed in range(2):
        trace = recorded(tmp_path, chats(seed))
        for capacity in (1, 2, 3, 5, 8, 13, 30, 60):
            expected = hits_of_the_store(trace, name, capacity)
            assert simulate(trace, name, capacity).tolist() == expected


@settings(max_examples=30, deadline=None)
@given(st.lists(turns, min_size=1, max_size=40), st.integers(1, 12))
def test_on_anything(drawn, capacity):
    with tempfile.TemporaryDirectory() as folder:
        trace = recorded(Path(folder), rows_of(drawn))
    for name in (*POLICIES, *NUMBERED):
        expected = hits_of_the_store(trace, name, capacity)
        assert simulate(trace, name, capacity).tolist() == expected, name


def test_the_numbers_matter(tmp_path):
    """Else the tests above compare `lru` with itself."""
    trace = recorded(tmp_path, chats(0))
    plain = simulate(trace, "lru", 13).tolist()
    found = [simulate(trace, name, 13).tolist() for name in NUMBERED]
    assert plain not in found
