"""Files of traces: each kind, packed and not, whole, broken and of other things."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile

import pytest

from headstart.bench.tracefiles import Kind, open_trace
from headstart.errors import ConfigError
from trace_cases import MLCOMMONS, MOONCAKE, TOKEN_IDS, WEKA, lines


@pytest.fixture
def file(tmp_path):
    def write(content, name="trace.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else lines(content))
        return path

    return write


def requests(path, block_size=None):
    return [each for session in open_trace(path, block_size).sessions for each in session]


@pytest.mark.parametrize("packed", [False, True])
def test_mooncakes(file, packed):
    path = file(gzip.compress(lines(MOONCAKE)) if packed else MOONCAKE)
    assert open_trace(path, 8).kind is Kind.MOONCAKE
    first, second, third = requests(path, 8)
    assert first.pieces == (("7", 8), ("8", 8), ("9", 4))
    assert second.pieces == (("7", 8), ("8", 8))
    assert [each.at_s for each in (first, second, third)] == [0.0, 0.25, 0.2505]
    assert [each.output_tokens for each in (first, second, third)] == [3, 0, 1]
    assert len({each.session for each in (first, second, third)}) == 3
    ((own, count),) = third.pieces
    assert (count, own not in {"7", "8", "9"}) == (5, True), "nobody else has it"


def tar_of(*members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


OTHER = {**WEKA, "id": "two"}
DOCUMENTS = {
    "a document": json.dumps(WEKA).encode(),
    "over several lines": json.dumps(WEKA, indent=1).encode(),
    "packed": gzip.compress(json.dumps(WEKA, indent=1).encode()),
    "lines": lines([WEKA, OTHER]),
    "tar": tar_of(
        ("x/README", b"of no interest"),
        ("x/one.json", json.dumps(WEKA, indent=1).encode()),
        ("x/two.json", json.dumps(OTHER).encode()),
    ),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_wekas(file, name):
    path = file(DOCUMENTS[name])
    trace = open_trace(path)
    assert (trace.kind, trace.has_sessions) == (Kind.WEKA, True)
    sessions = list(trace.sessions)
    assert len(sessions) == (2 if name in ("lines", "tar") else 1)
    first, sub, second, third = sessions[0]
    assert first.pieces[:2] == second.pieces[:2] == (("one/1", 4), ("one/2", 4))
    assert first.pieces[2] != second.pieces[2]
    assert [sum(count for _, count in each.pieces) for each in sessions[0]] == [9, 4, 13, 8]
    assert [each.turn for each in sessions[0]] == [0, 0, 1, 2]
    assert {first.session, second.session, third.session} == {"one"}
    assert sub.session != "one", "a sub-agent runs beside its agent"
    assert [each.think_s for each in sessions[0]] == [0.0, 0.0, 6.0, 3.0]
    assert {each.at_s for each in sessions[0]} == {None}
    keys = [{key for each in session for key, _ in each.pieces} for session in sessions]
    assert len(keys) == 1 or keys[0].isdisjoint(keys[1]), "ids are local"


def test_ids_that_are_not_local_are_shared(file):
    path = file([{**WEKA, "hash_id_scope": "global"}, {**OTHER, "hash_id_scope": "global"}])
    one, two = ([each.pieces[0] for each in session] for session in open_trace(path).sessions)
    assert one == two


def test_token_ids(file):
    first, second = requests(file(TOKEN_IDS))
    assert (first.tokens, second.tokens[-1]) == (tuple(range(20)), 99)
    assert first.pieces[0] == second.pieces[0]
    assert first.pieces[1] != second.pieces[1]
    assert [count for _, count in first.pieces] == [16, 4]
    assert (first.at_s, second.at_s, second.output_tokens) == (0.0, 2.0, 4)


def test_mlcommons(file):
    one, two = open_trace(file(MLCOMMONS)).sessions
    first, second = one
    assert [count for _, count in first.pieces] == [2, 3], "four characters a token"
    assert second.pieces[: len(first.pieces)] == first.pieces
    assert [count for _, count in second.pieces[2:]] == [1, 1, 3]
    assert (first.output_tokens, second.output_tokens) == (2, 1)
    assert (first.think_s, second.think_s, second.turn) == (0.0, 1.5, 1)
    assert two[0].pieces[0] == first.pieces[0], "all have the same system prompt"
    assert two[0].pieces[1] != first.pieces[1]


def test_nothing_is_read_before_it_is_asked_for(file):
    path = file(lines(MOONCAKE) + b"{broken\n")
    sessions = open_trace(path, 8).sessions
    assert next(sessions)[0].session == "0"
    with pytest.raises(ConfigError, match=r"trace.jsonl, line 4: JSON is malformed"):
        list(sessions)


def changed(rows, number, **fields):
    return [{**row, **(fields if index == number else {})} for index, row in enumerate(rows)]


def weka(number, **fields):
    return json.dumps({**WEKA, "requests": changed(WEKA["requests"], number, **fields)}).encode()


WRONG = {
    "nothing": (b"\n\n", "is empty"),
    "no JSON": (b"timestamp,input\n1,2\n", "line 1, is not JSON"),
    "deep": (b"[" * 100_000, "line 1, is not JSON: maximum recursion depth"),
    "deep agents": (
        b'{"id":"a","requests":' + b'[{"type":"subagent","requests":' * 5000,
        "line 1, is not JSON: maximum recursion depth",
    ),
    "no object": (b"[1]\n", "of no known kind .its keys: none.; known: Mooncake"),
    "others": (b'{"a": 1}\n', "of no known kind .its keys: a.; known: Mooncake"),
    "bailian": ([{"chat_id": 1, "timestamp": 1, "input_length": 1}], "Bailian"),
    "type": (changed(MOONCAKE, 1, input_length="x"), "line 2: Expected `int`, got `str`"),
    "missing": ([{"timestamp": 1, "input_length": 1}], "line 1: .*`output_length`"),
    "length": (changed(MOONCAKE, 2, input_length=0), "line 3: Expected `int` >= 1"),
    "blocks": (changed(MOONCAKE, 0, input_length=40), "line 1: 3 hash ids .*--trace-block-size"),
    "prompt": (changed(MOONCAKE, 0, input_length=10**15), "line 1: Expected `int` <= 16777216"),
    "endless answer": (changed(MOONCAKE, 0, output_length=10**30), "line 1: "),
    "time": (changed(MOONCAKE, 2, timestamp=1e300), r"line 3: a time of 1e\+300"),
    "times": (changed(MOONCAKE, 2, timestamp=3), "line 3: time 3.0 after 1250.0; sort"),
    "endless": (
        lines(MOONCAKE).replace(b"1250.5", b"1e999"),
        "line 3: ",
    ),
    "token": (changed(TOKEN_IDS, 1, input_tok_ids=[-1]), "line 2: Expected `int` >= 0"),
    "no token": (changed(TOKEN_IDS, 1, input_tok_ids=[]), "line 2: "),
    "answer": (MLCOMMONS[1:], "line 1: an assistant answers before anybody asked"),
    "twice": ([*MLCOMMONS, *MLCOMMONS[:2]], "session 'c' is there twice"),
    "cut short": (gzip.compress(lines(MOONCAKE[:1]) * 3000)[:-200], "line .*cannot be read"),
    "damaged": (gzip.compress(lines(MOONCAKE))[:30] + b"\0" * 60, "cannot be read"),
    "no length": (weka(0, **{"in": None}), "request 1 of one: it has no `in`"),
    "weka's blocks": (weka(2, **{"in": 99}), "request 3 of one: 3 hash ids are not the blocks of"),
    "tar": (tar_of(("one.json", b"{")), "one.json: "),
    "tar twice": (
        tar_of(("a.json", DOCUMENTS["a document"]), ("b.json", DOCUMENTS["a document"])),
        "session 'one.* is there twice",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_broken_is_refused_with_its_place(file, name):
    content, message = WRONG[name]
    path = file(content)
    with pytest.raises(ConfigError, match=message) as refused:
        requests(path, 8 if open_trace(path).kind is Kind.MOONCAKE else None)
    assert str(path) in str(refused.value)


def test_what_is_not_there_and_a_size_that_nobody_asks_for_are_refused(file, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        open_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="tells the size of its blocks itself"):
        open_trace(file(DOCUMENTS["tar"]), 16)


def test_a_pipe_cannot_be_read_twice(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(ConfigError, match="is no file; a trace is read more than once"):
            open_trace(path)
