"""`headstart bench serve`: exit codes, what is written, what is shown."""

from __future__ import annotations

import json
import sys

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
