"""`headstart bench serve --arm` with real engines, which it starts, restarts and ends itself.

In a file of its own, since no other engine is needed: one runs at a time.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.bench.imports import read_runs

# Four starts of an engine, each of half a minute on an idle machine.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

HEADSTART = str(Path(sys.executable).parent / "headstart")
LIMIT_S = 1500.0
LOAD = (
    *("--workload", "multi-turn", "--sessions", "3", "--turns", "3"),
    *("--shared-tokens", "512", "--own-tokens", "200", "--output-tokens", "4"),
    *("--vocabulary", "1000", "--block-size", "128", "--salt", "s"),
)
SERVED = (
    *("--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager"),
    *("--prefix-caching-hash-algo", "sha256_cbor", "--disable-uvicorn-access-log"),
)
ALWAYS = {
    "kv_connector": "HeadstartConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"node": "{socket}", "load": "always"},
}
ARMS = {"gpu-prefix": "gpu-prefix", "always": json.dumps(ALWAYS)}
PHASES = ("cold", "steady", "engine-restart")


def write_config(folder):
    config = folder / "node.toml"
    config.write_text(
        '[memory]\ncapacity = "128MiB"\n'
        f'[[tiers]]\nkind = "file"\nroot = "{folder / "blocks"}"\ncapacity = "256MiB"\n'
        'durable = false\ninflight_nbytes = "4MiB"\nthreads = 4\n'
    )
    return str(config)


def environment():
    inherited = {name: value for name, value in os.environ.items() if name[:5] != "VLLM_"}
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
        "VLLM_NO_USAGE_STATS": "1",
    }


def bench(*words):
    """Run it; it ends its engines when it is asked to end, too."""
    process = subprocess.Popen(
        [HEADSTART, "bench", "serve", *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=120)
    print(out)
    assert process.returncode == 0, err


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    """The run of each (arm, phase)."""
    folder = tmp_path_factory.mktemp("arms")
    path = folder / "runs.json"
    arms = [word for name, what in ARMS.items() for word in ("--arm", f"{name}={what}")]
    bench(
        *(*LOAD, *arms, "--phases", ",".join(PHASES), "--one-at-a-time"),
        *("--serve-model", str(model), "--node-config", write_config(folder)),
        *("--root", str(folder / "root"), "--json", str(path), "--", *SERVED),
    )
    assert list((folder / "root").iterdir()) == list((folder / "blocks").iterdir()) == []
    return {(run.arm, run.phase): run for run in read_runs(path)}


def cached(run):
    return [request.cached_tokens for request in run.requests]


def test_every_arm_answers_alike_in_every_phase(runs):
    assert list(runs) == [(arm, phase) for arm in ARMS for phase in PHASES]
    assert {request.error for run in runs.values() for request in run.requests} == {None}
    assert len({tuple(r.output for r in run.requests) for run in runs.values()}) == 1
    assert {run.has_prefix_cache for run in runs.values()} == {True}
    assert all(run.cpu_s > 0.0 for run in runs.values())
    assert all(run.peak_memory_nbytes > 1 << 20 for run in runs.values())


@pytest.mark.parametrize("arm", ARMS)
def test_hits_are_those_that_are_possible(runs, arm):
    for phase in ("cold", "steady"):
        run = runs[arm, phase]
        assert run.hit_rate == pytest.approx(run.simulated_hit_rate), phase
    assert runs[arm, "steady"].hit_rate > runs[arm, "cold"].hit_rate + 0.1


def test_an_engine_alone_begins_anew_after_its_restart(runs):
    assert cached(runs["gpu-prefix", "engine-restart"]) == cached(runs["gpu-prefix", "cold"])
    assert {runs["gpu-prefix", phase].hit_tokens_by_tier for phase in PHASES} == {None}


def test_a_node_gives_its_engine_back_what_it_had(runs):
    restarted = runs["always", "engine-restart"]
    assert cached(restarted) == cached(runs["always", "steady"])
    assert restarted.rebuild.hit_rate_s is not None


def test_hits_are_told_by_tier(runs):
    for phase in PHASES:
        run = runs["always", phase]
        assert sum(run.hit_tokens_by_tier.values()) == sum(cached(run)), phase
        assert run.hit_tokens_by_tier.get("file", 0) == 0, phase
    assert runs["always", "engine-restart"].hit_tokens_by_tier["memory"] > 0
