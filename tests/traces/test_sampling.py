"""Shares of a trace: whole sessions, always the same ones, and little memory."""

from __future__ import annotations

import tracemalloc

import pytest

from headstart.errors import ConfigError
from headstart.traces import sampling
from headstart.traces.files import open_trace
from headstart.traces.reading import Broken
from headstart.traces.sampling import Sample
from headstart.tuner.recorded import record
from headstart.tuner.writing import write_trace
from trace_cases import MLCOMMONS, TOKEN_IDS, WEKA, lines
from tuner_cases import SIZE, many_chats, prompts, recorded


def test_a_larger_share_has_the_smaller_one_and_another_seed_others():
    names = [str(number) for number in range(2000)]
    small, large, other = (
        {name for name in names if sample.takes(name)}
        for sample in (Sample(0.1, 3), Sample(0.4, 3), Sample(0.1, 4))
    )
    assert small < large
    assert len(small) == pytest.approx(200, abs=60)
    assert len(large) == pytest.approx(800, abs=100)
    assert len(small & other) < 60
    assert all(map(Sample(1.0).takes, names))


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, float("nan")])
def test_no_share_is_refused(share):
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        Sample(share)


def rows_of(trace):
    """What tells a request, whatever its number is."""
    columns = (trace.at_s, trace.input_tokens, trace.output_tokens, trace.lengths)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def weka(count):
    rows = []
    for number in range(count):
        requests = [{**each} for each in WEKA["requests"]]
        requests[0] = {**requests[0], "out": number}
        rows.append({**WEKA, "id": f"session/{number}", "requests": requests})
    return rows


def mlcommons(count):
    return [
        {**each, "conversation_id": f"{each['conversation_id']}/{number}"}
        for number in range(count)
        for each in MLCOMMONS
    ]


@pytest.mark.parametrize("kind", ["weka", "mlcommons", "headstart"])
def test_sessions_that_are_told_are_taken_whole_and_at_their_times(tmp_path, kind):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines(mlcommons(40) if kind == "mlcommons" else weka(40)))
    if kind == "headstart":
        path = tmp_path / "converted.jsonl"
        write_trace(path, record(tmp_path / "trace.jsonl"), "headstart")
    whole, some = record(path), record(path, share=0.3)
    assert set(rows_of(some)) < set(rows_of(whole)), "times are made up as for all of them"
    sizes = {len(some.session[some.session == each]) for each in some.session.tolist()}
    assert sizes <= {len(whole.session[whole.session == each]) for each in whole.session.tolist()}
    assert some.share == some.input_tokens.sum() / whole.input_tokens.sum()
    assert 0.1 < some.share < 0.5
    assert whole.share == 1.0
    assert some.has_sessions


def test_what_a_session_that_is_left_has_is_not_looked_at(tmp_path):
    """Its hash ids are the most of a trace."""
    rows = weka(30)
    left = [row for row in rows if not Sample(0.3).takes(row["id"])]
    for row in left:
        for request in row["requests"]:
            request["hash_ids"] = "none"
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines(rows))
    assert len(record(path, share=0.3)) == 4 * (30 - len(left)) > 0
    with pytest.raises(ConfigError, match="Expected `array`, got `str`"):
        record(path)


def chat_of(row):
    """Its first block that no other chat has."""
    return row["hash_ids"][3]


@pytest.mark.parametrize("seed", range(3))
def test_sessions_that_are_not_told_are_prompts_beyond_what_is_common(tmp_path, seed):
    rows = many_chats(seed, 120)
    for row in rows:
        row["output_length"] = chat_of(row)
    whole, some = recorded(tmp_path, rows), recorded(tmp_path, rows, share=0.4, seed=seed)
    taken = set(some.output_tokens.tolist())
    assert set(rows_of(some)) == {row for row in rows_of(whole) if row[2] in taken}, "whole ones"
    assert 20 < len(taken) < 80
    assert len(taken) == len(set(some.session.tolist()))
    assert some.share == some.input_tokens.sum() / whole.input_tokens.sum()
    more = recorded(tmp_path, rows, share=0.8, seed=seed)
    assert taken < set(more.output_tokens.tolist())
    fewer = sum(len(prompt) for prompt in prompts(some))
    assert fewer == len(some.blocks) < len(whole.blocks)


def test_a_first_look_at_some_of_the_requests_is_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "_MOST_LOOKED_AT", 1500)
    rows = many_chats(0, 200)
    for row in rows:
        row["output_length"] = chat_of(row)
    some = recorded(tmp_path, rows, share=0.5)
    taken = set(some.output_tokens.tolist())
    assert len(some) == sum(chat_of(row) in taken for row in rows)
    assert 60 < len(taken) < 140


def test_prompts_without_blocks_of_their_own_are_alone(tmp_path):
    rows = [
        {"timestamp": number, "input_length": SIZE + 1, "output_length": number, "hash_ids": [7]}
        for number in range(50)
    ]
    seed = next(seed for seed in range(99) if Sample(0.5, seed).takes("7"))
    assert len(recorded(tmp_path, rows, share=0.5, seed=seed)) == 50, "all ask the same"
    short = [{"timestamp": number, "input_length": 2, "output_length": 1} for number in range(50)]
    some = recorded(tmp_path, short, share=0.5)
    assert 10 < len(some) == len(set(some.session.tolist())) < 40


def test_token_ids_are_sampled_too(tmp_path):
    rows = [
        {**TOKEN_IDS[0], "input_tok_ids": [number, *range(40)], "arrival_time_ns": number}
        for number in range(40)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines(rows))
    assert 5 < len(record(path, share=0.5)) < 35


def test_broken_lines_are_counted_once_and_against_all_that_is_read(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines(many_chats(1, 30)) + b"{broken\n" * 20)
    broken = Broken()
    some = record(path, trace_block_size=SIZE, share=0.1, broken=broken)
    assert (len(some) < 20, broken.count) == (True, 20)
    with pytest.raises(ConfigError, match=r"no session is left of a share of 1e-09; take more"):
        record(path, trace_block_size=SIZE, share=1e-9, broken=Broken())
    with pytest.raises(ConfigError, match="JSON is malformed"):
        record(path, trace_block_size=SIZE, share=0.1)


def peak_nbytes(path, **options):
    tracemalloc.start()
    record(path, **options)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("kind", ["told", "not told"])
def test_memory_is_that_of_the_sample(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sampling, "_MOST_LOOKED_AT", 500)
    path = tmp_path / "trace.jsonl"
    rows = many_chats(2, 500)
    options = {"trace_block_size": SIZE}
    if kind == "told":
        rows, options = [], {}
        for number in range(300):
            ids = [*range(70)]
            requests = [{"t": 0.0, "in": 4 * len(ids), "out": 1, "hash_ids": ids}]
            rows.append({"id": f"{number}", "block_size": 4, "requests": requests})
    path.write_bytes(lines(rows))
    whole = peak_nbytes(path, **options)
    assert peak_nbytes(path, share=0.1, **options) < 0.35 * whole


def test_an_open_trace_says_what_was_left(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines(weka(20)))
    sample = Sample(0.5)
    sessions = list(open_trace(path, sample=sample).sessions)
    assert len(sessions) == 20
    assert sample.num_left == sum(not session for session in sessions) > 0
    assert sample.tokens_left == 34 * sample.num_left
