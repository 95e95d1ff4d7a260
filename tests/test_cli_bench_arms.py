"""`headstart bench serve --arm NAME=WHAT`: servers, nodes and phases as processes, and the gate."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys

import pytest

import prefix_server
from headstart.bench.counters import family
from headstart.bench.imports import read_runs
from headstart.cli.main import main
from node_process import wait_for, write_settings
from stream_server import Server, chunk

LOAD = (
    *("--workload", "multi-turn", "--sessions", "3", "--turns", "3", "--shared-tokens", "48"),
    *("--own-tokens", "40", "--output-tokens", "2", "--salt", "s", "--warm-up", "1"),
)


def arm(name, *words, token_s=0.0):
    program = (sys.executable, prefix_server.__file__, "--port", "{port}")
    return "--arm", f"{name}={shlex.join([*program, '--token-s', str(token_s), *words])}"


@pytest.fixture
def ended(capsys, tmp_path):
    """Runs the command to its end: exit code, what was written, what was printed."""

    def call(*words):
        path = tmp_path / "runs.json"
        path.unlink(missing_ok=True)
        where = ("--root", str(tmp_path / "root"), "--json", str(path))
        with pytest.raises(SystemExit) as end:
            main(["bench", "serve", *LOAD, *where, *words])
        written = path.read_text() if path.exists() else ""
        return end.value.code or 0, json.loads(written) if written else None, capsys.readouterr()

    return call


@pytest.fixture
def gate(capsys):
    def call(*words):
        with pytest.raises(SystemExit) as end:
            main(["gate", *words])
        return end.value.code, capsys.readouterr()

    return call


def test_pairs_of_two_arms_for_the_gate(ended, gate, tmp_path):
    """One file with everything; the cached arm is better by its hits alone."""
    arms = (*arm("none", "--no-cache", token_s=1e-3), *arm("cached", token_s=1e-3))
    code, told, printed = ended(*arms, "--rounds", "2", "--phases", "cold,steady")
    assert code == 0
    assert (told["schema"], "kernel" in told["environment"]) == ("headstart.bench.serve/1", True)
    made = [(r["round"], r["arm"], r["phase"], r["salt"]) for r in told["runs"]]
    assert made == [
        (number, name, phase, f"s-{number + 1}")
        for number, names in enumerate([("none", "cached"), ("cached", "none")])
        for name in names
        for phase in ("cold", "steady")
    ]
    assert not any(request["error"] for r in told["runs"] for request in r["requests"])
    for title in ("TTFT p50 ms", "hits back s", "cached  steady     2       0"):
        assert title in printed.out
    for run in told["runs"]:
        assert 0.0 <= run["cpu_s"] < 5.0
        assert 1 << 20 < run["peak_memory_nbytes"] < 1 << 30
        assert run["hit_tokens_by_tier"] is None, "no node"
    path = tmp_path / "runs.json"
    cold, steady = (read_runs(tmp_path / f"runs.json#cached/{p}") for p in ("cold", "steady"))
    for run in (*cold, *steady):
        assert run.hit_rate == pytest.approx(run.simulated_hit_rate, abs=0.1)
        assert run.hit_rate <= run.simulated_hit_rate
    assert min(r.hit_rate for r in steady) > max(r.hit_rate for r in cold) + 0.1
    assert not list((tmp_path / "root").iterdir()), "logs and blocks are removed"

    words = ("--throughput-gain", "0", "--ttft-drop", "20%")
    code, printed = gate("--baseline", f"{path}#none", "--candidate", f"{path}#cached", *words)
    # Where the machine is busy, its client may have sent late: a veto of its own.
    assert (code in (0, 1), "TTFT p50: PASS" in printed.out) == (True, True), printed
    code, printed = gate("--baseline", str(path), "--candidate", f"{path}#cached", *words)
    assert (code, "choose one, such as" in printed.err) == (3, True)
    code, printed = gate("--baseline", f"{path}#nobody", "--candidate", f"{path}#cached")
    assert code == 3
    assert "no 'nobody'; there are: none/cold, none/steady, cached/cold" in printed.err


def test_an_arm_with_a_node_through_all_restarts(ended, tmp_path):
    """What the engine forgets comes from the node's memory, and what that forgets from its disk."""
    words = ("--phases", "cold,steady,engine-restart,node-restart", "--rounds", "2")
    config = ("--node-config", str(write_settings(tmp_path)))
    code, told, printed = ended(*arm("ours", "--socket", "{socket}"), *words, *config)
    assert code == 0, printed
    runs = {(r["round"], r["phase"]): r for r in told["runs"]}
    assert len(runs) == 8
    asked = [[q["output"] for q in r["requests"]] for r in told["runs"]]
    assert asked[0] == asked[1] == asked[2] == asked[3] != asked[4]
    for number in range(2):
        tiers = {p: runs[number, p]["hit_tokens_by_tier"] for _, p in runs}
        cached = {p: sum(q["cached_tokens"] for q in runs[number, p]["requests"]) for _, p in runs}
        assert {p: sum(by_tier.values()) for p, by_tier in tiers.items()} == cached
        assert (tiers["cold"]["memory"], tiers["cold"]["file"]) == (0, 0), "the node was emptied"
        assert tiers["steady"]["engine"] == cached["steady"] > cached["cold"]
        assert tiers["engine-restart"]["memory"] > 0
        assert tiers["engine-restart"]["file"] == 0
        assert tiers["node-restart"]["file"] > 0
        assert cached["engine-restart"] == cached["steady"]
        for phase, run in ((p, runs[number, p]) for _, p in runs):
            assert (run["rebuild"] is not None) == phase.endswith("-restart")
            assert run["read_nbytes"] is None
        assert runs[number, "engine-restart"]["rebuild"]["hit_rate_s"] > 0.0
    assert list((tmp_path / "file").iterdir()) == [], "its blocks are removed"


@pytest.mark.root
def test_bytes_of_a_cold_host_come_from_the_device(ended, tmp_path):
    words = ("--phases", "cold,host-cold")
    config = ("--node-config", str(write_settings(tmp_path)))
    code, told, _ = ended(*arm("ours", "--socket", "{socket}"), *words, *config)
    cold, host_cold = told["runs"]
    assert (code, cold["read_nbytes"], cold["loaded_nbytes"]) == (0, None, None)
    # A disk that is slow just then is left alone: not every block need be read.
    assert host_cold["hit_tokens_by_tier"]["file"] > 0
    assert host_cold["read_nbytes"] >= host_cold["loaded_nbytes"] > 64 << 10


def test_a_server_that_cannot_forget_is_started_anew(ended):
    """In the second round, too, cold is cold."""
    words = ("--phases", "cold,steady", "--rounds", "2", "--salt", "s")
    code, told, _ = ended(*arm("a", "--no-reset"), *words)
    cold = [r for r in told["runs"] if r["phase"] == "cold"]
    hits = [sum(q["cached_tokens"] for q in r["requests"]) for r in cold]
    assert (code, hits[0]) == (0, hits[1])


def test_one_at_a_time(ended):
    arms = (*arm("a"), *arm("b"))
    code, told, _ = ended(*arms, "--one-at-a-time", "--rounds", "2")
    made = [(r["round"], r["arm"], r["phase"]) for r in told["runs"]]
    assert (code, made) == (0, [(0, "a", ""), (0, "b", ""), (1, "b", ""), (1, "a", "")])


def test_what_was_measured_before_a_server_died_is_kept(ended, tmp_path):
    """It ends after its first run and one request of the second."""
    words = ("--phases", "cold,steady", "--warm-up", "0")
    code, told, printed = ended(*arm("ok"), *arm("dies", "--die-after", "10"), *words)
    assert code == 2
    for part in ("arm dies ended with exit code 3", "out of memory, says the server", "server.log"):
        assert part in printed.err
    made = [(r["arm"], r["phase"]) for r in told["runs"]]
    assert made == [("ok", "cold"), ("ok", "steady"), ("dies", "cold"), ("dies", "steady")]
    errors = [bool(q["error"]) for q in told["runs"][-1]["requests"]]
    assert (errors[0], all(errors[1:])) == (False, True)
    assert "dies  steady     1       8" in printed.out
    assert list((tmp_path / "root").glob("serve-*/dies/server.log")), "its log stays"
    code, _, printed = ended(*arm("dies", "--die-after", "10"), *words, "--json", "-")
    assert (code, len(json.loads(printed.out)["runs"])) == (2, 2)


def test_a_server_that_does_not_come_up_is_one_error(ended, tmp_path):
    code, told, printed = ended(*arm("a"), *arm("b", "--crash"))
    assert (code, told) == (2, None)
    assert "arm b ended with exit code 1" in printed.err
    assert "no GPU, says the server" in printed.err
    code, _, printed = ended(*arm("a", "--hang"), "--start-limit", "2")
    assert (code, "does not answer at /v1/models within 2 s" in printed.err) == (2, True)


def test_a_node_that_nobody_uses_is_one_error(ended, tmp_path, monkeypatch):
    from headstart.bench import served

    monkeypatch.setattr(served, "_COME_BACK_S", 1.0)
    config = ("--node-config", str(write_settings(tmp_path)))
    code, _, printed = ended(*arm("a", "--ignored", "{socket}"), *config)
    assert code == 2
    assert "arm a: no engine has come to its node within 1 s; does its server use" in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--phases", "warm"), "--phases 'warm' is unknown; known: cold, steady"),
        (("--phases", "steady"), "begin with cold"),
        (("--phases", "cold,engine-restart"), "needs a server that the bench starts"),
        ((*arm("a"), "--phases", "cold,node-restart"), "no sense for the arm a"),
        (("--arm", "a", "--arm", "b"), "--arm without =WHAT names the one server at --url"),
        ((*arm("a"), "--arm", "b"), "--arm without =WHAT"),
        ((*arm("a"), "--url", "http://other:1"), "name one"),
        (("--arm", "a=headstart"), "--serve-model"),
        (("stray",), "what follows a lone --"),
        (("--rounds", "0"), "greater than or equal to 1"),
        ((*arm("a"), "--node-config", "/none.toml"), "does not exist"),
        ((*arm("a"), "--root", "/proc/none"), "--root /proc/none: "),
        (("--arm", "a=./none {port}"), "'./none' cannot be started: No such file"),
    ],
)
def test_wrong_usage_ends_with_2_before_anything_starts(ended, words, message):
    code, told, printed = ended(*words)
    assert (code, told) == (2, None)
    assert message in printed.err


def test_a_url_has_rounds_and_the_phases_that_need_no_restart(ended):
    server = Server()
    try:
        lengths = {"prompt_tokens": 20, "completion_tokens": 2}
        server.events = [chunk("a"), {"choices": [], "usage": lengths}, "[DONE]"]
        load = ("--workload", "unique", "--shared-tokens", "0", "--own-tokens", "4")
        where = ("--url", server.url, *load)
        code, told, printed = ended(*where, "--phases", "cold,steady")
        assert (code, told) == (2, None)
        assert "does not empty its cache by POST /reset_prefix_cache" in printed.err
        server.can_reset = True
        code, told, _ = ended(*where, "--phases", "cold,steady", "--arm", "theirs")
        assert [(r["arm"], r["phase"]) for r in told["runs"]] == [
            ("theirs", "cold"),
            ("theirs", "steady"),
        ]
        assert (code, server.num_resets) == (0, 1)
        code, told, _ = ended(*where, "--rounds", "2")
        assert [r["salt"] for r in told["runs"]] == ["s-1", "s-2"]
        code, told, _ = ended(*where)
        assert (told["salt"], "runs" in told) == ("s", False)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_signal_ends_servers_and_nodes_and_keeps_the_runs(tmp_path, number, code):
    path = tmp_path / "runs.json"
    words = [
        *(sys.executable, "-m", "headstart", "bench", "serve", *LOAD),
        *arm("quick", "--socket", "{socket}"),
        *arm("slow", token_s=0.02),
        *("--node-config", str(write_settings(tmp_path)), "--root", str(tmp_path / "root")),
        *("--warm-up", "0", "--json", str(path)),
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            wait_for(lambda: path.exists() and path.stat().st_size, "a run")
            pids = family([process.pid])
            assert len(pids) == 4, "the command, two servers, a node"
            process.send_signal(number)
            out, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (b"quick" in out) == (number != signal.SIGKILL)
    assert (
        process.returncode in (code, 1) if number == signal.SIGINT else process.returncode == code
    )
    wait_for(lambda: not family(pids), "the end of all")
    (run,) = json.loads(path.read_text())["runs"]
    assert run["arm"] == "quick"
    if number != signal.SIGKILL:  # which leaves nobody who could remove the blocks
        assert not list((tmp_path / "file").iterdir())
