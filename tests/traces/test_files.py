"""Files of traces: each kind, packed and not, whole, broken and of other things."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile

import pytest

from headstart.errors import ConfigError
from headstart.traces.files import Kind, open_trace
from headstart.traces.reading import Broken
from trace_cases import MLCOMMONS, MOONCAKE, SHAREGPT, TOKEN_IDS, WEKA, lines


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


def test_mooncakes_lines_may_tell_the_size_of_their_blocks(file):
    told = [{**row, "block_size": 8} for row in MOONCAKE]
    for path in (file(told), file([MOONCAKE[1] | {"block_size": 8}, *MOONCAKE[1:]], "some.jsonl")):
        assert open_trace(path).block_size == open_trace(path, 8).block_size == 8
        assert requests(path)[0].pieces[0] == ("7", 8)
        with pytest.raises(ConfigError, match="8 tokens, as it says itself, not for 16; leave out"):
            open_trace(path, 16)
    assert open_trace(file(MOONCAKE)).block_size == 512
    with pytest.raises(
        ConfigError, match=r"line 2: blocks of 4 tokens after some of 8: .*namespace"
    ):
        requests(file(changed(told, 1, block_size=4)))
    with pytest.raises(ConfigError, match="first line: Expected `int` >= 1"):
        open_trace(file([{**told[0], "block_size": 0}]))


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
    assert sub.session != "one", "a nested session runs beside the one it is in"
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


TALKS = {
    "an array": json.dumps(SHAREGPT).encode(),
    "over several lines": json.dumps(SHAREGPT, indent=1).encode(),
    "lines": lines(SHAREGPT),
    "tar": tar_of(("all.json", json.dumps(SHAREGPT, indent=1).encode())),
    "with one broken": json.dumps([*SHAREGPT, {"conversations": [{"from": "human"}]}]).encode(),
}


@pytest.mark.parametrize("name", TALKS)
def test_sharegpts(file, name):
    broken = Broken()
    trace = open_trace(file(TALKS[name], "talks.json"), broken=broken)
    (first, second), (other,) = trace.sessions
    assert (trace.kind, trace.has_sessions) == (Kind.SHAREGPT, True)
    assert [count for _, count in first.pieces] == [16, 9]
    assert [count for _, count in second.pieces] == [16, 9, 8, 1]
    assert second.pieces[:2] == first.pieces
    assert first.pieces[0] == other.pieces[0], "they begin alike"
    assert first.pieces[1] != other.pieces[1]
    assert [each.output_tokens for each in (first, second, other)] == [8, 1, 0]
    assert len({each.session for each in (first, second, other)}) == 2
    if name == "with one broken":
        assert "conversation 4: Object missing required field `value`" in broken.first[0]
    assert broken.count == (name == "with one broken")


def test_an_array_of_others_is_refused(file):
    with pytest.raises(ConfigError, match="is an array of Mooncake; write one a line"):
        open_trace(file(json.dumps(MOONCAKE).encode()))
    with pytest.raises(ConfigError, match=r"no known kind .*ShareGPT \(conversations\)"):
        open_trace(file(b"[[3]]"))


def test_times_may_count_something_else(file):
    trace = open_trace(file(MOONCAKE), 8, unit_s=1.0)
    assert [session[0].at_s for session in trace.sessions] == [0.0, 250.0, 250.5]
    with pytest.raises(ConfigError, match="times cannot count 0 s"):
        open_trace(file(MOONCAKE), 8, unit_s=0.0)
    with pytest.raises(ConfigError, match="it is known what times of WEKA count"):
        open_trace(file([WEKA]), unit_s=1.0)


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
    "deep sessions": (
        b'{"id":"a","requests":' + b'[{"requests":' * 5000,
        "line 1, is not JSON: maximum recursion depth",
    ),
    "no object": (b"[1]\n", "of no known kind .its keys: none.; known: Mooncake"),
    "others": (b'{"a": 1}\n', "of no known kind .its keys: a.; known: Mooncake"),
    "bailian": ([{"chat_id": 1, "timestamp": 1, "input_length": 1}], "line 1: .*`output_length`"),
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


BAILIAN = [
    {
        "chat_id": 7,
        "parent_chat_id": -1,
        "timestamp": 61.5,
        "type": "text",
        "turn": 1,
        "input_length": 20,
        "output_length": 5,
        "hash_ids": [3, 4],
    },
    {
        "chat_id": 8,
        "parent_chat_id": 7,
        "timestamp": 63.0,
        "type": "text",
        "turn": 2,
        "input_length": 50,
        "output_length": 5,
        "hash_ids": [3, 9, 10],
    },
]


def test_bailians(file):
    path = file(BAILIAN)
    trace = open_trace(path)
    assert (trace.kind, trace.block_size, trace.has_sessions) == (Kind.BAILIAN, 16, False)
    first, second = requests(path)
    assert first.pieces == (("3", 16), ("4", 4))
    assert second.pieces[:3] == (("3", 16), ("9", 16), ("10", 16))
    assert (first.has_short_block, second.has_short_block) == (True, False)
    assert [first.at_s, second.at_s] == [0.0, 1.5]


def test_tars_of_lines(file):
    packed = tar_of(("x/README", b"none"), ("x/a.jsonl", lines(MOONCAKE[:2])), ("b.jsonl", b"{\n"))
    path = file(packed, "trace.tar.gz")
    assert open_trace(path).kind is Kind.MOONCAKE
    broken = Broken()
    assert len(list(open_trace(path, 8, broken).sessions)) == 2
    assert (broken.count, "b.jsonl, line 1" in broken.first[0]) == (1, True)
    path = file(tar_of(("two.jsonl", lines([WEKA, OTHER]))), "sessions.tar.gz")
    assert [session[0].session for session in open_trace(path).sessions] == ["one", "two"]
    with pytest.raises(ConfigError, match=r"is empty of \.json, \.jsonl"):
        open_trace(file(tar_of(("README", b"none")), "none.tar.gz"))


def test_sessions_behind_a_broken_one_are_kept(file):
    broken = Broken()
    path = file(b"{oops\n" + lines([WEKA, OTHER]))
    assert len(list(open_trace(path, broken=broken).sessions)) == 2
    assert broken.count == 1


BROKEN = {
    "no JSON": (lines(MOONCAKE[:1]) + b"{oops\n" + lines(MOONCAKE[1:]), 3, "line 2: JSON"),
    "the first line": (b"oops\n" + lines(MOONCAKE), 3, "line 1: JSON"),
    "blocks": (changed(MOONCAKE, 0, input_length=40), 2, "line 1: 3 hash ids"),
    "endless": (lines(MOONCAKE).replace(b"1250.5", b"1e999"), 2, "line 3: "),
    "token": (changed(TOKEN_IDS, 1, input_tok_ids=[-1]), 1, "line 2: Expected"),
    "message": (changed(MLCOMMONS, 3, role=7), 2, "line 4: Expected"),
    "answer": (MLCOMMONS[1:], 2, "line 1: an assistant answers"),
    "twice": ([*MLCOMMONS, *MLCOMMONS[:2]], 3, "session 'c' is there twice"),
    "weka's blocks": (lines([OTHER, json.loads(weka(2, **{"in": 99}))]), 4, "3 hash ids"),
    "tar": (tar_of(("one.json", b"{"), ("two.json", json.dumps(OTHER).encode())), 4, "one.json: "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_counted_and_left_out(file, name):
    content, num_good, message = BROKEN[name]
    path = file(content)
    broken = Broken()
    kind = open_trace(path, broken=Broken()).kind
    trace = open_trace(path, 8 if kind is Kind.MOONCAKE else None, broken)
    assert len([each for session in trace.sessions for each in session]) == num_good
    assert broken.count == 1
    assert message in broken.first[0]
    assert str(path) in broken.first[0]


def test_what_comes_before_damage_is_kept(file):
    path = file(gzip.compress(lines(MOONCAKE[:2]) * 3000)[:-200])
    broken = Broken()
    found = [each for session in open_trace(path, 8, broken).sessions for each in session]
    assert 1000 < len(found) < 6000
    assert (broken.count, "cannot be read" in broken.first[-1]) == (1, True)


@pytest.mark.parametrize("rows", [MOONCAKE, SHAREGPT[:1] * 50])
def test_damage_near_the_start_leaves_what_is_before(file, rows):
    packed = gzip.compress(lines(rows), 0)[:-30]
    broken = Broken()
    found = list(open_trace(file(packed), None if rows != MOONCAKE else 8, broken).sessions)
    assert (len(found), broken.count) == (len(rows) - 1, 1)


def test_a_byte_order_mark_is_no_damage(file):
    mark = b"\xef\xbb\xbf"
    assert len(requests(file(mark + lines(MOONCAKE)), 8)) == 3
    for content in (mark + DOCUMENTS["a document"], mark + DOCUMENTS["over several lines"]):
        assert len(requests(file(content))) == len(requests(file([WEKA])))
    assert len(requests(file(tar_of(("a.json", mark + DOCUMENTS["a document"])), "x.tar"))) == 4


def test_times_beyond_all_bounds_are_broken(file):
    rows = [
        {"schema": "headstart.trace/1", "block_size": 4, "has_sessions": True},
        {"session": "a", "in": 4, "out": 1, "ids": [1], "at_s": 1e300},
        {"session": "b", "in": 4, "out": 1, "ids": [1], "at_s": -3.0},
    ]
    broken = Broken()
    assert len(list(open_trace(file(rows), broken=broken).sessions)) == 1
    assert "$.at_s" in broken.first[0]


def test_only_the_first_broken_lines_are_kept(file):
    broken = Broken()
    path = file(lines(MOONCAKE) + b"oops\n" * 50)
    assert len(list(open_trace(path, 8, broken).sessions)) == 3
    assert (broken.count, len(broken.first)) == (50, 5)


def test_times_that_go_back_are_fine_where_the_caller_sorts(file):
    path = file(changed(MOONCAKE, 2, timestamp=3))
    broken = Broken()
    found = [session[0].at_s for session in open_trace(path, 8, broken).sessions]
    assert (found, broken.count) == ([0.0, 0.25, -0.997], 0)


def test_folders(file, tmp_path):
    (tmp_path / "deep").mkdir()
    for name, content in (("b.json", WEKA), ("deep/a.json", OTHER)):
        file(json.dumps(content).encode(), name)
    file(b"of no interest", "README")
    trace = open_trace(tmp_path)
    assert trace.kind is Kind.WEKA
    assert [session[0].session for session in trace.sessions] == ["one", "two"]


def test_folders_of_lines(file, tmp_path):
    file(MOONCAKE[:2], "part-0.jsonl")
    file(gzip.compress(lines(MOONCAKE[2:])), "part-1.jsonl.gz")
    assert [each.at_s for each in requests(tmp_path, 8)] == [0.0, 0.25, 0.2505]


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no file of a trace: .json"):
        open_trace(tmp_path)


HEADSTART = [
    {"schema": "headstart.trace/1", "block_size": 4, "has_sessions": True},
    {"session": "0", "in": 9, "out": 2, "ids": [0, 1]},
    {"session": "0/1", "in": 4, "out": 1, "ids": [2]},
    {"session": "0", "turn": 1, "in": 11, "out": 2, "ids": [0, 1, 3], "think_s": 2.5},
    {"session": "1", "in": 4, "out": 1, "ids": [0]},
]


def test_headstarts_own_form(file):
    trace = open_trace(file(HEADSTART))
    assert (trace.kind, trace.has_sessions, trace.block_size) == (Kind.HEADSTART, True, 4)
    one, two = trace.sessions
    first, sub, second = one
    assert [first.session, sub.session, two[0].session] == ["0", "0/1", "1"]
    assert first.pieces[:2] == second.pieces[:2] == (("0", 4), ("1", 4))
    assert (second.pieces[2], second.has_short_block) == (("3", 3), True)
    assert (first.pieces[2][1], first.has_short_block) == (1, False)
    assert (second.turn, second.think_s, second.at_s) == (1, 2.5, None)
    with pytest.raises(ConfigError, match="line 2: 2 hash ids are not the blocks of 4"):
        requests(file(changed(HEADSTART, 1, **{"in": 99})))
    with pytest.raises(ConfigError, match=r"line 1: .*`block_size`"):
        requests(file([{"schema": "headstart.trace/1"}]))


def test_a_pipe_cannot_be_read_twice(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="is no file; a trace is read more than once"):
        open_trace(pipe)
