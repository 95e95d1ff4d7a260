"""Traces in memory: blocks of any size, order, sessions, samples, and what is written of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headstart.errors import ConfigError
from headstart.traces.reading import Broken
from headstart.tuner.curve import last_use
from headstart.tuner.facts import infinite, info
from headstart.tuner.recorded import NO_PARENT, record
from headstart.tuner.writing import write_trace
from trace_cases import MLCOMMONS, MOONCAKE, TOKEN_IDS, WEKA, lines
from tuner_cases import SIZE, chats, prompts, recorded


@pytest.fixture
def read(tmp_path):
    def written(rows, **options):
        path = tmp_path / "trace.jsonl"
        path.write_bytes(rows if isinstance(rows, bytes) else lines(rows))
        return record(path, **options)

    return written


def test_mooncakes_blocks(read):
    trace = read(MOONCAKE, trace_block_size=8)
    assert prompts(trace) == [[0, 1, 2], [0, 1], []]
    assert trace.parent.tolist() == [NO_PARENT, 0, 1]
    assert trace.tokens().tolist() == [8, 8, 4, 8, 8]
    assert trace.prefix_tokens(np.array([3, 1, 0])).tolist() == [20, 8, 0]
    assert trace.prefix_tokens(np.array([2, 2, 0])).tolist() == [16, 16, 0]
    assert trace.input_tokens.tolist() == [20, 16, 5]
    assert trace.at_s.tolist() == [0.0, 0.25, 0.2505]


def test_wekas_blocks_are_whole_and_sub_agents_are_of_their_session(read):
    trace = read([WEKA, {**WEKA, "id": "two"}], seed=3)
    assert (trace.block_size, trace.has_sessions, trace.has_times) == (4, True, False)
    assert sorted(trace.session.tolist()) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert sorted(map(len, prompts(trace))) == [1, 1, 2, 2, 2, 2, 3, 3]
    assert (np.diff(trace.at_s) >= 0).all()
    mine = trace.session == 0
    waits = np.diff(trace.at_s[mine & (trace.agent == 0)]).tolist()
    assert waits == pytest.approx([6.0, 3.0])
    assert not set(trace.blocks[np.repeat(mine, trace.lengths)]) & set(
        trace.blocks[np.repeat(~mine, trace.lengths)]
    )


def test_blocks_of_texts_and_tokens_end_where_they_are_told(read):
    trace = read(TOKEN_IDS)
    assert (trace.block_size, prompts(trace)) == (16, [[0], [0]])
    trace = read(MLCOMMONS, block_size=2)
    # A prompt of 5 tokens, the same with 5 more, and one that shares its first 2.
    assert prompts(trace) == [[0, 1], [0, 1, 2, 3, 4], [0]]
    assert infinite(trace).block_cold == 3 / 8


def test_ids_that_follow_different_ids_are_different_blocks(read):
    rows = [
        {**MOONCAKE[0], "input_length": 16, "hash_ids": ids} for ids in ([1, 2], [3, 2], [2, 2])
    ]
    trace = read(rows, trace_block_size=8)
    assert prompts(trace) == [[0, 1], [2, 3], [4, 5]]
    assert trace.num_unchained == 3
    assert infinite(trace).tokens_cold == 0.0


def test_requests_are_sorted_by_time(read):
    rows = [{**MOONCAKE[1], "timestamp": time, "hash_ids": [time, 1]} for time in (30, 10, 20, 10)]
    trace = read(rows, trace_block_size=8, broken=Broken())
    assert trace.at_s.tolist() == [-0.02, -0.02, -0.01, 0.0]
    assert trace.place.tolist() == [1, 3, 2, 0]
    first, second, third, fourth = prompts(trace)
    assert first == second != third
    assert fourth[0] == 0, "it was read first"


@pytest.mark.parametrize("factor", [2, 3])
def test_longer_blocks_are_those_of_a_trace_that_has_them(tmp_path, factor):
    rows = chats(5)
    coarse = recorded(tmp_path, rows).coarser(factor)
    longer = [{**row, "hash_ids": _every(row["hash_ids"], factor)} for row in rows]
    path = tmp_path / "longer.jsonl"
    path.write_bytes(lines(longer))
    expected = record(path, trace_block_size=SIZE * factor)
    assert coarse.block_size == expected.block_size
    assert (coarse.starts == expected.starts).all()
    assert (coarse.tokens() == expected.tokens()).all()
    assert (last_use(coarse.blocks) == last_use(expected.blocks)).all()
    parents = [int(coarse.parent[block]) for block in coarse.blocks]
    for blocks, first in zip(prompts(coarse), coarse.starts, strict=False):
        assert parents[first : first + len(blocks)] == [NO_PARENT, *blocks][: len(blocks)]


def _every(ids, factor):
    """The last id of each so many; a different rest is a different block."""
    return [ids[min(end, len(ids)) - 1] for end in range(factor, len(ids) + factor, factor)]


def test_longer_blocks_are_whole_where_those_of_the_trace_are(read):
    coarse = read([WEKA]).coarser(2)
    assert sorted(map(len, prompts(coarse))) == [0, 1, 1, 1]
    assert coarse.last_tokens[coarse.lengths > 0].tolist() == [8, 8, 8]


def test_sessions_are_prompts_that_begin_alike_beyond_what_many_share(tmp_path):
    rows = []
    for number in range(60):  # 20 chats of 3 turns, behind one system prompt of 2 blocks
        chat, turn = number % 20, number // 20
        ids = [1, 2, *(1000 * (chat + 1) + part for part in range(turn + 1))]
        rows.append(
            {"timestamp": number, "input_length": 4 * len(ids), "output_length": 1, "hash_ids": ids}
        )
    trace = recorded(tmp_path, rows)
    assert trace.session.tolist() == [*range(20)] * 3


def same(one, two):
    assert one.block_size == two.block_size
    for name in ("starts", "input_tokens", "output_tokens", "last_tokens", "session", "agent"):
        assert getattr(one, name).tolist() == getattr(two, name).tolist(), name
    assert last_use(one.blocks).tolist() == last_use(two.blocks).tolist()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [MOONCAKE, [WEKA, {**WEKA, "id": "two"}], MLCOMMONS, TOKEN_IDS])
def test_what_is_written_is_read_again(read, tmp_path, rows, packed):
    trace = read(rows, trace_block_size=8 if rows is MOONCAKE else None)
    path = tmp_path / ("again.jsonl.gz" if packed else "again.jsonl")
    write_trace(path, trace, "headstart")
    again = record(path)
    same(trace, again)
    assert again.at_s.tolist() == trace.at_s.tolist()
    assert (again.has_times, again.has_sessions) == (trace.has_times, trace.has_sessions)


def test_mooncakes_form_is_written_and_read_again(read, tmp_path):
    trace = read([WEKA, {**WEKA, "id": "two"}])
    write_trace(tmp_path / "again.jsonl", trace, "mooncake")
    first = json.loads((tmp_path / "again.jsonl").read_text().splitlines()[0])
    assert set(first) == {"timestamp", "input_length", "output_length", "hash_ids"}
    again = record(tmp_path / "again.jsonl", trace_block_size=4)
    assert again.input_tokens.tolist() == trace.input_tokens.tolist()
    assert last_use(again.blocks).tolist() == last_use(trace.blocks).tolist()
    with pytest.raises(ConfigError, match="not written as 'csv'; known: headstart, mooncake"):
        write_trace(tmp_path / "x", trace, "csv")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_trace(tmp_path / "none" / "x", trace, "mooncake")


def test_what_a_trace_is_like(read):
    found = info(read(MOONCAKE, trace_block_size=8))
    assert (found["requests"], found["blocks"], found["unique_blocks"]) == (3, 5, 3)
    assert (found["unique_tokens"], found["used_once"]) == (20, 1 / 3)
    assert found["infinite_hit"]["tokens_cold"] == 16 / 41
    assert found["infinite_hit"]["tokens_last_half"] == 16 / 21
    assert (found["requests_with_hit"], found["span_s"]) == (1 / 3, 0.2505)
    assert found["reuse_s_quantiles"]["max"] == 0.25
    alone = info(read(MOONCAKE[2:], trace_block_size=8))
    assert (alone["reuse_s_quantiles"], alone["requests_with_hit"]) == (None, 0.0)


def test_what_cannot_be_told_is_refused(read):
    with pytest.raises(ConfigError, match=r"blocks of 12 tokens cannot be told .* a multiple of"):
        read(MOONCAKE, trace_block_size=8, block_size=12)
    with pytest.raises(ConfigError, match="blocks of 2 tokens cannot be told"):
        read([WEKA], block_size=2)
    with pytest.raises(ConfigError, match=r"rate of 0\.0 a second"):
        read([WEKA], sessions_per_s=0.0)
    with pytest.raises(ConfigError, match=r"no request that can be read: .*line 1: 3 hash ids"):
        read([{**MOONCAKE[0], "input_length": 99}], trace_block_size=8, broken=Broken())
