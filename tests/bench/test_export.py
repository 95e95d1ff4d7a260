"""Loads as Mooncake's traces: what is written, and that it comes back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.bench.drive import Pace, starts_of
from headstart.bench.export import mooncake, scheduled, write_mooncake
from headstart.bench.load import WORKLOADS, Ask, Shape, hit_rate, make_load, theoretical_hits
from headstart.bench.traces import Cut, load_trace
from headstart.errors import ConfigError


def ask(*tokens, session="0", **known):
    return Ask(session=session, tokens=tokens, num_shared=0, max_tokens=3, **known)


def timed(asks):
    return [(float(number), each) for number, each in enumerate(asks)]


def back(path, block_size):
    return load_trace("trace", path, Cut(block_size=block_size), Shape())


def test_equal_starts_have_equal_ids():
    lines = list(mooncake([(2.0, ask(1, 2, 3, 4, 5)), (2.25, ask(1, 2, 3, 9)), (9.0, ask(7))], 2))
    assert lines == [
        {"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [0, 1, 2]},
        {"timestamp": 250, "input_length": 4, "output_length": 3, "hash_ids": [0, 3]},
        {"timestamp": 7000, "input_length": 1, "output_length": 3, "hash_ids": [4]},
    ]


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("block_size", [16, 100])
def test_a_load_comes_back_with_the_same_hits(tmp_path, workload, block_size):
    asks = make_load(workload, Shape(sessions=6, shared_tokens=128, own_tokens=70, documents=3))
    lines = scheduled(asks, starts_of(asks, Pace(rate=1.0)))
    path = tmp_path / "load.jsonl"
    write_mooncake(path, lines, block_size)
    found = back(path, block_size)
    sent = [each for _, each in lines]
    assert [len(each.tokens) for each in found] == [len(each.tokens) for each in sent]
    assert theoretical_hits(found, block_size) == theoretical_hits(sent, block_size)
    assert hit_rate(found, block_size) == hit_rate(sent, block_size)
    assert [each.at_s for each in found] == pytest.approx(
        [at_s - lines[0][0] for at_s, _ in lines], abs=6e-4
    )


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=8)


@given(prompts, st.integers(1, 5))
def test_whatever_comes_back_hits_as_before(tmp_path_factory, texts, block_size):
    asks = [ask(*text, session=f"{number}") for number, text in enumerate(texts)]
    path = tmp_path_factory.mktemp("export") / "load.jsonl"
    write_mooncake(path, timed(asks), block_size)
    assert theoretical_hits(back(path, block_size), block_size) == theoretical_hits(
        asks, block_size
    )


def test_times_are_those_of_the_trace_or_of_sessions_and_their_pauses():
    asks = [
        ask(1, session="a"),
        ask(2, session="b"),
        ask(3, session="a", think_s=5.0),
        ask(4, session="a", think_s=1.0),
    ]
    found = scheduled(asks, {"a": 0.0, "b": 2.0})
    assert [(at_s, each.tokens[0]) for at_s, each in found] == [(0, 1), (2, 2), (5, 3), (6, 4)]
    asks = [ask(1, session="a", at_s=3.0), ask(2, session="b", at_s=1.0)]
    assert [each.tokens[0] for _, each in scheduled(asks, {"a": 0.0, "b": 0.0})] == [2, 1]


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        write_mooncake(tmp_path / "none" / "x.jsonl", timed([ask(1)]), 16)
    path = tmp_path / "x.jsonl"
    write_mooncake(path, timed([ask(1), ask(2)]), 16)
    assert [json.loads(line)["timestamp"] for line in path.read_text().splitlines()] == [0, 1000]
