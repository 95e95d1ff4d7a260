"""Runs of a load that never was: log-normal times, as they are measured."""

import random

import pytest

from headstart.bench.run import Request, Run


def make_run(median_s=1.0, *, seed=0, count=40, sigma=0.5, tpot_s=0.01, tokens=11, **changed):
    """A run whose median TTFT is exactly `median_s`; two requests a session."""
    rng = random.Random(seed)
    times = sorted(rng.lognormvariate(0.0, sigma) for _ in range(count))
    middle = times[(count + 1) // 2 - 1]
    rng.shuffle(times)
    requests = []
    for number, time in enumerate(times):
        ttft_s = time / middle * median_s
        requests.append(
            Request(
                session=f"{number // 2}",
                prompt_tokens=100 + number,
                output_tokens=tokens,
                ttft_s=ttft_s,
                latency_s=ttft_s + tpot_s * (tokens - 1),
                intended_s=float(number),
                sent_s=number + 0.001,
                cached_tokens=50,
                output=f"answer {number}",
            )
        )
    known = {
        "tool": "headstart",
        "duration_s": 10.0,
        "has_prefix_cache": True,
        "prompts": "same",
        "pace": {"rate": None, "concurrency": 4.0},
        "simulated_hit_rate": sum(r.cached_tokens for r in requests)
        / sum(r.prompt_tokens for r in requests),
        "read_nbytes": 100,
        "loaded_nbytes": 90,
    }
    return Run(requests=tuple(requests), **{**known, **changed})


@pytest.fixture
def run():
    return make_run
