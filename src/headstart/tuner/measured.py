"""What an engine takes to compute, learnt from what it took: runs of `headstart bench serve`.

The time to a first token of a request that is alone is one step of its engine, and all that serves
it: of the tokens that were not cached, which attend to all. So what requests cost besides their
tokens, which no peak and no MFU tells, is in `step_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from headstart.bench.run import Run
from headstart.costs import EngineCosts, EngineModel, num_pairs
from headstart.errors import ConfigError
from headstart.tuner.latency import ENGINE


def learnt_costs(runs: Sequence[Run], prior: EngineCosts) -> EngineCosts:
    """`prior` with the prefills of runs whose requests came one at a time. Raises ConfigError.

    Each counts as one step, though a prompt beyond the largest takes several: those are full.
    """
    model = EngineModel(prior)
    times: dict[tuple[int, int], list[float]] = {}
    for run in runs:
        _check(run)
        for request in run.good:
            cached = request.cached_tokens or 0
            times.setdefault((cached, request.prompt_tokens - cached), []).append(
                request.ttft_s or 0.0
            )
    for (cached, new), seconds in times.items():
        model.step(new, num_pairs(cached, new), median(seconds))
    if not model.num_observed:
        raise ConfigError("no run has a request from which prefills could be learnt")
    return replace(model.costs, uncertainty=prior.uncertainty)


def _check(run: Run) -> None:
    """Raises ConfigError where times are of more than one request's prefill."""
    name = f"the run {run.arm or run.tool}{f'/{run.phase}' if run.phase else ''}"
    if run.pace is None or run.pace.get("concurrency") != 1:
        raise ConfigError(
            f"{name} did not send one request at a time, so its times are of queues, too; measure "
            "prefills with `headstart bench serve --concurrency 1`"
        )
    num_bad = len(run.requests) - len(run.good)
    if num_bad:
        raise ConfigError(
            f"{name} has {num_bad:,} requests that failed, and the next one may have waited for "
            "what was left of them; measure prefills with a run in which none fails"
        )
    if any(request.cached_tokens is None for request in run.good):
        raise ConfigError(
            f"{name} does not tell what was cached; vLLM does with --enable-prompt-tokens-details"
        )
    loaded = {name: count for name, count in (run.hit_tokens_by_tier or {}).items() if count}
    if loaded.keys() - {ENGINE}:
        raise ConfigError(
            f"{name} loaded from {', '.join(sorted(loaded.keys() - {ENGINE}))}, so its times are "
            "not of prefills alone; choose an arm without: FILE#ARM/PHASE"
        )
