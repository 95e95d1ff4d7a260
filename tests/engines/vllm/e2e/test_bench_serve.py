"""`headstart bench serve` and `headstart gate` on a real engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.bench.imports import read_runs

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

HEADSTART = str(Path(sys.executable).parent / "headstart")
LOAD = (
    *("--workload", "multi-turn", "--sessions", "3", "--turns", "3"),
    *("--shared-tokens", "512", "--own-tokens", "200", "--output-tokens", "4"),
    *("--vocabulary", "1000", "--block-size", "128"),
)


@pytest.fixture(scope="module")
def node(make_node):
    return make_node()


@pytest.fixture(scope="module")
def engine(make_engine, node):
    return make_engine(node).wait_ready()


def bench(engine, path, salt, *words, code=0):
    """A run of the load; what is in its file."""
    asked = (HEADSTART, "bench", "serve", "--url", engine.url, *LOAD, "--salt", salt, *words)
    done = subprocess.run([*asked, "--json", str(path)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return read_runs(Path(path))[0]


def test_what_is_measured_is_what_was_sent(engine, node, tmp_path):
    """Hits are those that are possible, no more and no fewer; and the second time, all."""
    engine.forget()
    run = bench(engine, tmp_path / "cold.json", "one")
    assert [r.error for r in run.requests] == [None] * 9
    assert [r.output_tokens for r in run.requests] == [4] * 9
    assert run.hit_rate == pytest.approx(run.simulated_hit_rate)
    assert 0.3 < run.hit_rate < 0.9
    assert (run.workload, run.salt, len(run.good)) == ("multi-turn", "one", 9)
    node.written()
    engine.forget()
    warm = bench(engine, tmp_path / "warm.json", "one", "--rate", "50")
    assert warm.hit_rate > run.hit_rate + 0.1
    assert [r.output for r in warm.requests] == [r.output for r in run.requests]
    other = bench(engine, tmp_path / "other.json", "two")
    assert other.hit_rate == pytest.approx(run.hit_rate), "another salt is another run"


def test_the_gate_reads_its_runs(engine, node, tmp_path):
    """The hit rate of a run that profits from another one is no hit rate to show."""
    files = {"baseline": [], "candidate": []}
    for number in range(2):
        for arm, names in files.items():
            names.append(str(tmp_path / f"{arm} {number}.json"))
            if arm == "candidate":
                engine.forget()
            bench(engine, names[-1], f"pair {number}", "--arm", arm)
    words = ["--baseline", *files["baseline"], "--candidate", *files["candidate"]]
    done = subprocess.run(
        [HEADSTART, "gate", *words, "--json", "-"], capture_output=True, text=True
    )
    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert any("the load as sent allows" in veto for veto in told["vetoes"])
    assert not any("answers differ" in veto for veto in told["vetoes"])
