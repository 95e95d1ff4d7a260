"""Prefills learnt from runs: what made them is found again, and what tells nothing is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headstart.bench.imports import read_runs
from headstart.bench.run import Request, Run
from headstart.costs import EngineCosts
from headstart.errors import ConfigError
from headstart.tuner.measured import learnt_costs

PRIOR = EngineCosts(
    step_s=5e-3,
    token_s=1e-4,
    pair_s=1e-9,
    uncertainty=0.0,
    max_step_tokens=8192,
    copy_bytes_per_s=4e9,
)
TRUE = EngineCosts(
    step_s=0.2,
    token_s=4e-3,
    pair_s=3e-6,
    uncertainty=0.0,
    max_step_tokens=8192,
    copy_bytes_per_s=1e9,
)
REAL = Path(__file__).parents[1] / "data" / "serve_arms.json"


def run_of(costs, *prompts, **changes):
    """A run of prompts of (tokens, cached), one at a time."""
    requests = tuple(
        Request(
            session=f"{number}",
            prompt_tokens=tokens,
            cached_tokens=cached,
            output_tokens=1,
            ttft_s=costs.prefill_s(cached, tokens),
        )
        for number, (tokens, cached) in enumerate(prompts)
    )
    run = Run(
        tool="headstart",
        arm="own",
        phase="cold",
        duration_s=1.0,
        requests=requests,
        pace={"concurrency": 1, "rate": None},
    )
    return msgspec.structs.replace(run, **changes)


MANY = [(tokens, cached) for tokens in (40, 200, 500, 900, 1500) for cached in (0, 16, 32)]


def test_what_made_a_run_is_found_again():
    found = learnt_costs([run_of(TRUE, *MANY[:7]), run_of(TRUE, *MANY[7:])], PRIOR)
    for tokens, cached in ((64, 0), (700, 600), (1200, 300), (2000, 0)):
        assert found.prefill_s(cached, tokens) == pytest.approx(
            TRUE.prefill_s(cached, tokens), rel=0.02
        )
    assert found.step_s == pytest.approx(TRUE.step_s, rel=0.1)
    assert (found.copy_bytes_per_s, found.uncertainty) == (4e9, 0.0), "it says nothing of these"


def test_what_is_computed_again_and_again_counts_once_by_its_median():
    again = run_of(TRUE, *[(500, 0)] * 49)
    slow = [
        msgspec.structs.replace(each, ttft_s=3.0 * each.ttft_s) if number > 24 else each
        for number, each in enumerate(again.requests)
    ]
    found = learnt_costs(
        [run_of(TRUE, *MANY), msgspec.structs.replace(again, requests=tuple(slow))], PRIOR
    )
    assert found.prefill_s(0, 500) == pytest.approx(TRUE.prefill_s(0, 500), rel=0.02)


def test_a_real_run_is_learnt_to_a_tenth():
    one, other = [run for run in read_runs(REAL) if run.arm == "gpu-prefix"]
    found = learnt_costs([one], PRIOR)
    times = [
        found.prefill_s(request.cached_tokens, request.prompt_tokens) for request in other.requests
    ]
    assert sum(times) == pytest.approx(sum(each.ttft_s for each in other.requests), rel=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pace": {"concurrency": 2}}, "the run own/cold did not send one request at a time"),
        ({"pace": {"rate": 1.0}}, "did not send one request at a time"),
        ({"pace": None}, "did not send one request at a time"),
        ({"hit_tokens_by_tier": {"engine": 9, "file": 1, "memory": 3}}, "from file, memory, so"),
    ],
)
def test_times_of_more_than_a_prefill_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        learnt_costs([run_of(TRUE, *MANY, **changes)], PRIOR)


def test_a_run_with_failures_is_refused():
    run = run_of(TRUE, *MANY)
    failed = msgspec.structs.replace(run.requests[0], error="timeout")
    run = msgspec.structs.replace(run, requests=(*run.requests, failed))
    with pytest.raises(ConfigError, match="own/cold has 1 requests that failed"):
        learnt_costs([run], PRIOR)


def test_hits_of_the_engine_alone_are_welcome():
    run = run_of(TRUE, *MANY, hit_tokens_by_tier={"engine": 9, "file": 0})
    assert learnt_costs([run], PRIOR).step_s > 0.1


def test_what_tells_nothing_is_refused():
    with pytest.raises(ConfigError, match="no run has a request from which prefills"):
        learnt_costs([run_of(TRUE, (64, 64))], PRIOR)
    unknown = run_of(TRUE, (64, 0))
    hidden = msgspec.structs.replace(unknown.requests[0], cached_tokens=None)
    with pytest.raises(ConfigError, match="does not tell what was cached; vLLM does with"):
        learnt_costs([msgspec.structs.replace(unknown, requests=(hidden,))], PRIOR)
