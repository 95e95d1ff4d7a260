"""`headstart bench serve`: exit codes, what is written, what is shown."""

from __future__ import annotations

import json
import sys
import time

import pytest

from headstart.bench.load import SALT_TOKENS
from headstart.cli.main import main
from stream_server import USAGE, Server, chunk

LOAD = ("--workload", "unique", "--sessions", "3", "--shared-tokens", "0", "--own-tokens", "4")
LENGTH = 2 * SALT_TOKENS + 4


@pytest.fixture
def server():
    server = Server()
    usage = {**USAGE["usage"], "prompt_tokens": LENGTH}
    server.events = [chunk("a"), chunk("b"), {"choices": [], "usage": usage}, "[DONE]"]
    yield server
    server.close()


def ended(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(["bench", "serve", *args])
    return end.value.code or 0, capsys.readouterr()


def test_a_run_is_written_and_shown(server, capsys, tmp_path):
    path = tmp_path / "run.json"
    words = ("--url", server.url + "/", *LOAD, "--salt", "s", "--arm", "mine", "--json", str(path))
    code, printed = ended(capsys, *words)
    assert (code, "TTFT p50" in printed.out) == (0, True)
    run = json.loads(path.read_text())
    assert (run["schema"], run["arm"], run["salt"]) == ("headstart.bench.serve/1", "mine", "s")
    assert len(run["requests"]) == 3
    assert len(server.bodies) == 5, "two of them were to warm up"
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == 5
    ended(capsys, *words)
    assert [tuple(body["prompt"]) for body in server.bodies[7:]] == prompts[2:], "the same salt"


def test_failed_requests_are_in_the_result_and_the_exit_code(server, capsys):
    server.status = 429
    code, printed = ended(capsys, "--url", server.url, *LOAD, "--json", "-")
    assert code == 1
    errors = [request["error"] for request in json.loads(printed.out)["requests"]]
    assert errors == ["HTTP 429: Too Many Requests"] * 3
    code, printed = ended(capsys, "--url", server.url, *LOAD)
    assert "HTTP 429" in printed.out


def test_a_url_may_be_that_of_other_tools_and_an_error_may_be_anything(server, capsys):
    server.status, server.text = 503, "\x1b[31mgone\r\n\nfor good"
    code, printed = ended(capsys, "--url", f"{server.url}/v1/", *LOAD)
    assert code == 1
    assert "HTTP 503:  [31mgone   for good" in printed.out, "and no escape"


def test_an_interrupt_leaves_no_file_of_nothing(server, capsys, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("headstart.bench.campaign.run_campaign", interrupted)
    path = tmp_path / "run.json"
    code, _ = ended(capsys, "--url", server.url, *LOAD, "--json", str(path))
    assert (code, path.exists()) == (130, False)


def test_an_slo_is_told_and_a_page_is_written(server, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    words = ("--url", server.url, *LOAD, "--slo", "mlperf-llama2-70b-server", "--html", str(page))
    code, printed = ended(capsys, *words, "--json", "-")
    told = json.loads(printed.out)
    assert (code, told["slo"]["share"], told["slo"]["limits_s"]["tpot"]) == (0, 1.0, 0.2)
    assert told["slo"]["goodput_per_s"] == pytest.approx(3 / told["duration_s"])
    assert all(len(request["itl_s"]) == 1 for request in told["requests"])
    assert "goodput" in page.read_text(encoding="utf-8")
    _, printed = ended(capsys, *words)
    assert "not MLPerf" in printed.out
    assert "goodput, requests/s" in printed.out


def test_a_page_of_nothing_is_refused_but_the_run_is_kept(server, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    server.status = 429
    words = ("--url", server.url, *LOAD, "--html", str(tmp_path / "page.html"), "--json", "-")
    code, printed = ended(capsys, *words)
    assert (code, "there is nothing to draw" in printed.err) == (2, True)
    assert len(json.loads(printed.out)["requests"]) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--slo", "ttft"), "--slo 'ttft' is unknown"),
        (("--html", "/proc/none/x"), "--html /proc/none/x: cannot be written"),
        (("--url", "http://127.0.0.1:9"), "cannot be reached"),
        (("--url", "127.0.0.1"), "cannot be reached"),
        (("--json", "/proc/none/x"), "cannot be written"),
        (("--workload", "ragg"), "workload 'ragg' is unknown; known: "),
        (("--rate", "1", "--concurrency", "2"), "name one"),
        (("--sessions", "0"), "greater than or equal to 1"),
        (("--sessions", "99999999999999"), "too large to be held in memory"),
        (("--salt", ""), "--salt is empty"),
        (("--arm", "a/b"), "the name 'a/b' must be letters, digits"),
    ],
)
def test_wrong_usage_ends_with_2(capsys, words, message):
    code, printed = ended(capsys, *words)
    assert code == 2
    assert message in printed.err


def test_what_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    code, printed = ended(capsys)
    assert (code, "pip install 'headstart[bench]'" in printed.err) == (2, True)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 50 * n, "input_length": 12, "output_length": 2, "hash_ids": [0, 1 + n]}
        for n in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("--workload", "trace", "--trace", str(path), "--trace-block-size", "8")


def test_a_trace_is_sent_at_its_times_by_several_processes(server, trace, capsys, tmp_path):
    usage = {"prompt_tokens": SALT_TOKENS + 12, "completion_tokens": 2}
    server.events[2] = {"choices": [], "usage": usage}
    path = tmp_path / "run.json"
    words = (*trace, "--trace-time", "--time-scale", "0.5", "--processes", "2", "--json", str(path))
    code, printed = ended(capsys, "--url", server.url, *words, "--block-size", "4")
    assert (code, printed.err) == (0, "")
    run = json.loads(path.read_text())
    assert [r["intended_s"] for r in run["requests"]] == pytest.approx([0.0, 0.025, 0.05, 0.075])
    assert run["pace"] == {
        "rate": None,
        "concurrency": None,
        "trace_time": 1.0,
        "processes": 2,
        "time_scale": 0.5,
        "think_s": 0.0,
    }
    assert run["simulated_hit_rate"] == 3 * (SALT_TOKENS + 8) / (4 * (SALT_TOKENS + 12))
    prompts = [body["prompt"] for body in server.bodies[2:]]
    assert len({tuple(prompt[: SALT_TOKENS + 8]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 4
    assert {body["max_tokens"] for body in server.bodies} == {2}


def test_a_warm_up_does_not_pause(server, capsys, tmp_path):
    path = tmp_path / "session.json"
    requests = [
        {"t": 0.0, "type": "n", "in": 64, "out": 2, "hash_ids": [1]},
        {"t": 0.0, "type": "n", "in": 64, "out": 2, "hash_ids": [1], "think_time": 2.0},
    ]
    path.write_text(json.dumps({"id": "one", "requests": requests}))
    words = ("--workload", "agentic", "--trace", str(path), "--json", "-")
    usage = {"prompt_tokens": SALT_TOKENS + 64, "completion_tokens": 2}
    server.events[2] = {"choices": [], "usage": usage}
    started = time.monotonic()
    code, printed = ended(capsys, "--url", server.url, *words)
    assert 2.0 <= time.monotonic() - started < 4.0
    assert (code, len(json.loads(printed.out)["requests"]), len(server.bodies)) == (0, 2, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workload", "trace"), "--workload trace needs a file: --trace FILE"),
        (("--trace", "x"), "--trace is for the workloads trace and agentic, not for multi-turn"),
        (("--workload", "trace", "--trace", "/none"), "cannot be read"),
        (("--trace-time",), "this load has no times of its own"),
        (("--trace-time", "--rate", "1"), "name one"),
        (("--processes", "3", "--concurrency", "2"), "3 processes cannot share 2 sessions at once"),
    ],
)
def test_wrong_usage_of_traces_and_processes(server, capsys, words, message):
    code, printed = ended(capsys, "--url", server.url, *words)
    assert code == 2
    assert message in printed.err
    assert server.bodies == [], "before anything is sent"
