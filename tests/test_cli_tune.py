"""`headstart trace` and `headstart tune`: what is printed, written and refused."""

from __future__ import annotations

import gzip
import json

import pytest

from headstart.cli.main import main
from headstart.tuner.simulate import simulate
from trace_cases import MLCOMMONS, WEKA, lines
from tuner_cases import chats


def ended(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(list(map(str, args)))
    return end.value.code or 0, capsys.readouterr()


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "load.jsonl.gz"
    path.write_bytes(gzip.compress(lines(chats(7)) + b"{broken\n"))
    return path


SIZE = ("--trace-block-size", "4")


def test_info(capsys, trace):
    code, printed = ended(capsys, "trace", "info", trace, *SIZE)
    assert code == 0
    for text in ("Mooncake", "requests", "120", "by how prompts begin", "not read: 1", "line 121"):
        assert text in printed.out
    code, printed = ended(capsys, "trace", "info", trace, *SIZE, "--json", "-")
    document = json.loads(printed.out)
    assert (document["schema"], document["requests"]) == ("headstart.trace.info/1", 120)
    assert document["broken"]["count"] == 1


def test_info_of_a_trace_without_times(capsys, tmp_path):
    path = tmp_path / "agents.json"
    path.write_text(json.dumps(WEKA))
    _, printed = ended(capsys, "trace", "info", path)
    assert "made up" in printed.out
    _, printed = ended(capsys, "tune", path)
    assert "tells no times" in printed.out


def test_a_converted_and_a_sampled_trace_are_traces(capsys, trace, tmp_path):
    for form, words in (("headstart", ()), ("mooncake", SIZE)):
        out = tmp_path / f"{form}.jsonl"
        code, printed = ended(capsys, "trace", "convert", trace, out, *SIZE, "--to", form)
        assert (code, "not read: 1" in printed.out) == (0, True)
        _, before = ended(capsys, "trace", "info", trace, *SIZE, "--json", "-")
        _, after = ended(capsys, "trace", "info", out, *words, "--json", "-")
        one, two = json.loads(before.out), json.loads(after.out)
        for field in ("requests", "sessions", "input_tokens", "unique_blocks", "infinite_hit"):
            assert one[field] == two[field]
        assert two["broken"]["count"] == 0
    out = tmp_path / "some.jsonl.gz"
    chat = tmp_path / "chats.jsonl"
    chat.write_bytes(lines(MLCOMMONS))
    words = ("--share", "50%", "--seed", "4", "--json", "-")
    code, printed = ended(capsys, "trace", "sample", chat, out, *words)
    document = json.loads(printed.out)
    assert (code, document["sessions"]) == (0, 1)
    assert document["requests"] in (1, 2)
    code, printed = ended(capsys, "trace", "info", out, "--json", "-")
    assert json.loads(printed.out)["requests"] == document["requests"]


def test_tune(capsys, trace, tmp_path):
    pytest.importorskip("matplotlib")
    page, result = tmp_path / "page.html", tmp_path / "result.json"
    words = ("--policies", "lru,fifo,optimal", "--html", page, "--json", result)
    code, printed = ended(capsys, "tune", trace, *SIZE, *words)
    assert code == 0
    for text in ("no limit", "recommended capacity", "recommended block size", "not read: 1"):
        assert text in printed.out
    document = json.loads(result.read_text())
    assert document["schema"] == "headstart.tune/1"
    assert document["trace"]["requests"] == 120
    assert 0 < document["infinite_hit"]["tokens_cold"] < 1
    assert {each["policy"] for each in document["curve"]} == {"lru", "fifo", "optimal"}
    assert "<svg" in page.read_text()


def test_tune_at_chosen_points(capsys, trace):
    words = ("--capacities", "100,40,100", "--policies", "fifo", "--token-kv", "128KiB")
    _, printed = ended(capsys, "tune", trace, *SIZE, *words)
    assert "12.5 MiB" in printed.out
    code, printed = ended(capsys, "tune", trace, *SIZE, *words, "--json", "-")
    document = json.loads(printed.out)
    points = [(each["policy"], each["capacity_tokens"]) for each in document["curve"]]
    assert (code, points) == (0, [("fifo", 40), ("fifo", 100)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tune", "/nowhere/x"), "cannot be read"),
        (("tune", "{trace}"), "most of it, cannot be read: "),
        (("tune", "{trace}", *SIZE, "--policies", "best"), "policy 'best' is unknown; known: lru"),
        (("tune", "{trace}", *SIZE, "--capacities", "1GiB"), "no numbers of tokens; write such"),
        (("tune", "{trace}", *SIZE, "--capacities", "0"), "no numbers of tokens; write such"),
        (("tune", "{trace}", *SIZE, "--token-kv", "much"), "'much' is not a quantity"),
        (("tune", "{trace}", *SIZE, "--token-kv", "0"), "'0' is not the KV of a token"),
        (("tune", "{trace}", *SIZE, "--token-kv", "1TiB"), "'1TiB' is not the KV of a token"),
        (("tune", "{trace}", *SIZE, "--rate", "2"), "tells its times, which --rate does not"),
        (("tune", "{trace}", *SIZE, "--trace-unit", "0"), "times cannot count 0 s"),
        (("trace", "convert", "{trace}", "{trace}", *SIZE), "have to be different files"),
        (("trace", "convert", "{trace}", "x", *SIZE, "--json", "x"), "have to be different"),
        (("tune", "{trace}", *SIZE, "--gain", "x"), "--gain 'x' is no share"),
        (("tune", "{trace}", *SIZE, "--block-size", "6"), "a multiple of that can"),
        (("tune", "{trace}", *SIZE, "--json", "/proc/none/x"), "cannot be written"),
        (("trace", "convert", "{trace}", "/proc/none/x", *SIZE), "cannot be written"),
        (("trace", "convert", "{trace}", "x", *SIZE, "--to", "csv"), "known: headstart, mooncake"),
        (("trace", "sample", "{trace}", "x", *SIZE, "--share", "2"), "--share '2' is no share"),
    ],
)
def test_wrong_usage_ends_with_2(capsys, trace, words, message):
    code, printed = ended(capsys, *(word.format(trace=trace) for word in words))
    assert code == 2
    assert message in printed.err


def test_one_file_for_two_results_is_refused(capsys, trace, tmp_path):
    pytest.importorskip("matplotlib")
    words = ("--html", tmp_path / "x", "--json", tmp_path / "x")
    code, printed = ended(capsys, "tune", trace, *SIZE, *words)
    assert (code, "write them to two files" in printed.err) == (2, True)


def test_what_cannot_be_written_is_told_before_a_trace_is_read(capsys, tmp_path):
    words = ("trace", "convert", "/nowhere/trace", "/proc/none/x")
    code, printed = ended(capsys, *words)
    assert (code, "cannot be written" in printed.err) == (2, True)


def test_a_trace_is_whole_or_as_it_was(capsys, trace, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    out.write_text("before")

    def interrupted(*args):
        yield {"some": 1}
        raise KeyboardInterrupt

    monkeypatch.setattr("headstart.tuner.writing._headstart", interrupted)
    code, _ = ended(capsys, "trace", "convert", trace, out, *SIZE)
    assert code != 0
    assert out.read_text() == "before"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["load.jsonl.gz", "out.jsonl"]


def test_points_that_are_done_stay_after_ctrl_c(capsys, trace, tmp_path, monkeypatch):
    def interrupted(recorded, name, *args):
        if name == "sieve":
            raise KeyboardInterrupt
        return simulate(recorded, name, *args)

    monkeypatch.setattr("headstart.tuner.tune.simulate", interrupted)
    result = tmp_path / "result.json"
    words = ("--capacities", "40,100", "--policies", "fifo,sieve,lru", "--json")
    code, printed = ended(capsys, "tune", trace, *SIZE, *words, result)
    document = json.loads(result.read_text())
    assert (code, document["interrupted"]) == (130, True)
    assert "interrupted: the result has what was done" in printed.err
    points = [(each["policy"], each["capacity_tokens"]) for each in document["curve"]]
    assert points == [("fifo", 40), ("fifo", 100)]
    code, printed = ended(capsys, "tune", trace, *SIZE, *words, "-")
    assert (code, json.loads(printed.out)["curve"]) == (130, document["curve"])
    code, printed = ended(capsys, "tune", trace, *SIZE, "--policies", "sieve", "--json", "-")
    assert (code != 0, printed.out) == (True, "")
