"""`headstart bench rate` against a server that answers so many at once."""

from __future__ import annotations

import asyncio
import json

import pytest

from headstart.bench import run as bench_run
from headstart.bench import serve as bench_serve
from headstart.bench.load import SALT_TOKENS
from headstart.cli.main import main
from stream_server import USAGE, Server, chunk

LENGTH = 2 * SALT_TOKENS + 4
LOAD = ("--workload", "unique", "--shared-tokens", "0", "--own-tokens", "4", "--seconds", "0")
DELAY_S, NUM_SLOTS = 0.02, 4
CAPACITY = NUM_SLOTS / (3 * DELAY_S)


@pytest.fixture
def server(monkeypatch):
    server = Server()
    usage = {**USAGE["usage"], "prompt_tokens": LENGTH}
    server.events = [chunk("a"), {"choices": [], "usage": usage}, "[DONE]"]
    server.delay_s, server.slots = DELAY_S, asyncio.Semaphore(NUM_SLOTS)
    # Client and server share a process here, so that the one makes the other late.
    monkeypatch.setattr(bench_run, "_MAX_SEND_LAG_SHARE", 100.0)
    yield server
    server.close()


def ended(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(["bench", "rate", *args])
    return end.value.code or 0, capsys.readouterr()


def test_the_rate_at_which_a_server_falls_behind_is_found(server, capsys, tmp_path):
    result, page = tmp_path / "rate.json", tmp_path / "rate.html"
    words = (
        *("--url", server.url, *LOAD, "--requests", "60", "--first-rate", "40", "--arm", "mine"),
        *("--slo", "ttft=250ms", "--slo-share", "90%", "--precision", "50%"),
        *("--json", str(result), "--html", str(page)),
    )
    code, printed = ended(capsys, *words)
    assert (code, "highest rate" in printed.out) == (0, True)
    told = json.loads(result.read_text())
    assert told["schema"] == "headstart.bench.rate/1"
    # Sixty requests at a higher rate may end before the queue is long.
    assert 0.05 * CAPACITY <= told["best_rate"] <= 3.0 * CAPACITY
    met = [trial["rate"] for trial in told["trials"] if trial["is_met"]]
    missed = [trial["rate"] for trial in told["trials"] if not trial["is_met"]]
    assert told["best_rate"] == max(met) < min(missed) <= 1.5 * told["best_rate"]
    assert told["is_precise"]
    for number, trial in enumerate(told["trials"]):
        assert trial["run"] == number
        run = told["runs"][number]
        assert run["pace"]["rate"] == trial["rate"]
        assert (len(run["requests"]), run["arm"]) == (60, "mine")
        good = sum((request["ttft_s"] or 9.0) <= 0.25 for request in run["requests"])
        assert trial["share"] == good / 60
    salts = [run["salt"] for run in told["runs"]]
    assert len(set(salts)) == len(salts), "no trial hits what another one stored"
    assert "First token against throughput" in page.read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["bench", "report", str(result), "--json", "-"])
    report = json.loads(capsys.readouterr().out)
    assert len(report["runs"]) == len(told["runs"])


def test_a_client_that_sends_late_ends_the_search(server, capsys, monkeypatch):
    monkeypatch.setattr(bench_run, "_MAX_SEND_LAG_SHARE", 0.0)
    words = ("--slo", "ttft=1s", "--requests", "5", "--first-rate", "50", "--json", "-")
    code, printed = ended(capsys, "--url", server.url, *LOAD, *words)
    told = json.loads(printed.out)
    assert (code, told["best_rate"], len(told["trials"])) == (1, None, 1)
    assert told["trials"][0]["outcome"] == "invalid"
    assert "the client sent late" in told["ended"]
    assert len(told["runs"]) == 1, "it is kept"


def test_a_server_that_answers_nothing_meets_nothing(server, capsys):
    server.status = 429
    words = ("--slo", "ttft=1s", "--requests", "2", "--first-rate", "50")
    code, printed = ended(capsys, "--url", server.url, *LOAD, *words)
    assert code == 1
    assert "no rate met the SLO; requests that were alone at the server missed it" in printed.out
    assert printed.out.count("missed") == 2, "the only trial, and the answer"


def test_trials_are_kept_one_by_one(server, capsys, monkeypatch, tmp_path):
    path, found = tmp_path / "rate.json", []
    measure = bench_serve.measure

    def looked(*args):
        found.append(len(json.loads(path.read_text())["runs"]) if path.exists() else 0)
        return measure(*args)

    monkeypatch.setattr(bench_serve, "measure", looked)
    words = ("--slo", "ttft=9s", "--requests", "3", "--first-rate", "50", "--max-trials", "3")
    ended(capsys, "--url", server.url, *LOAD, *words, "--json", str(path))
    assert found == [0, 1, 2]


def test_what_was_found_until_an_interrupt_is_kept(server, capsys, monkeypatch):
    measure, calls = bench_serve.measure, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(bench_serve, "measure", interrupted)
    words = ("--slo", "ttft=9s", "--requests", "3", "--first-rate", "50", "--json", "-")
    code, printed = ended(capsys, "--url", server.url, *LOAD, *words)
    told = json.loads(printed.out)
    assert code == 130
    assert (told["best_rate"], told["ended"], len(told["runs"])) == (100.0, "interrupted", 2)


def test_a_server_that_goes_away_ends_the_search_with_what_is_known(server, capsys):
    words = ("--slo", "ttft=9s", "--requests", "3", "--first-rate", "50", "--json", "-")
    server.num_models_left = 3  # asked before the warm-up, and before each of two trials
    code, printed = ended(capsys, "--url", server.url, *LOAD, *words)
    told = json.loads(printed.out)
    assert (code, told["best_rate"]) == (0, 100.0)
    assert [trial["outcome"] for trial in told["trials"]] == ["met", "met", "invalid"]
    assert "answers 503: gone" in told["ended"]
    assert [trial["run"] for trial in told["trials"]] == [0, 1, None]


def trace_file(folder, num):
    path = folder / "trace.jsonl"
    lines = [
        {"timestamp": n * 1000, "input_length": 4, "output_length": 2, "hash_ids": [n]}
        for n in range(num)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_trial_takes_of_a_trace_what_it_needs(server, capsys, tmp_path):
    usage = {"prompt_tokens": SALT_TOKENS + 4, "completion_tokens": 2}
    server.events = [chunk("a"), {"choices": [], "usage": usage}, "[DONE]"]
    words = (
        *("--workload", "trace", "--trace", str(trace_file(tmp_path, 30)), "--url", server.url),
        *("--slo", "ttft=9s", "--max-trials", "2", "--first-rate", "100", "--seconds", "0.1"),
    )
    code, printed = ended(capsys, *words, "--requests", "5", "--json", "-")
    told = json.loads(printed.out)
    assert code == 0
    # A tenth of a second at 100 and at 200 sessions/s.
    assert [len(run["requests"]) for run in told["runs"]] == [10, 20]
    code, printed = ended(capsys, *words)
    assert (code, "the trace has 30 requests, and a trial 300" in printed.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name with --slo what requests have to meet"),
        (("--slo", ""), "name with --slo what requests have to meet"),
        (("--slo", "ttft=1s", "--precision", "0"), "a precision of 0.0"),
        (("--slo", "ttft=1s", "--first-rate", "1e300"), "too large to be held in memory"),
        (("--slo", "ttft=1s", "--seconds", "inf"), "--seconds"),
        (("--slo", "ttft=1s", "--arm", "a/b"), "the name 'a/b' must be letters, digits"),
        (("--slo", "ttft=1s", "--slo-share", "often"), "--slo-share 'often' is no share"),
        (("--slo", "ttft=1s", "--workload", "ragg"), "workload 'ragg' is unknown"),
        (("--slo", "ttft=1s", "--html", "/proc/none/x"), "--html /proc/none/x"),
        (("--slo", "ttft=1s", "--url", "http://127.0.0.1:9"), "cannot be reached"),
    ],
)
def test_wrong_usage_ends_with_2(capsys, words, message):
    code, printed = ended(capsys, *words)
    assert (code, message in printed.err) == (2, True)
