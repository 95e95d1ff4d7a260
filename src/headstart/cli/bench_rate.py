"""`headstart bench rate`: the highest rate at which a server meets an SLO."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart import render
from headstart.cli.bench_report import check_html, report_runs
from headstart.cli.bench_serve import (
    ApiKey,
    BlockSize,
    Documents,
    Model,
    OutputTokens,
    OwnTokens,
    PrefixCache,
    Seed,
    SharedTokens,
    Think,
    Turns,
    Url,
    Vocabulary,
    WarmUp,
    Workload,
)
from headstart.cli.options import Html, JsonTarget, SloText, parse_share
from headstart.errors import ConfigError, HeadstartError

if TYPE_CHECKING:
    from headstart.bench.rate import Plan, Trial
    from headstart.bench.serve import Load
    from headstart.bench.slo import Slo

EXIT_FINDING = 1
Told = Mapping[str, Any]
"""The command's options by their names, as typer has checked them."""


def rate(
    context: typer.Context,
    slo: SloText,
    slo_share: Annotated[
        str, typer.Option(help="Share of the requests that have to meet the SLO.")
    ] = "99%",
    first_rate: Annotated[
        float, typer.Option(min=1e-6, help="The first to try: sessions that start a second.")
    ] = 1.0,
    precision: Annotated[
        str, typer.Option(help="How near the answer has to be to a rate that misses.")
    ] = "5%",
    max_trials: Annotated[int, typer.Option(min=1, help="Rates to try at most.")] = 16,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a trial, at least.")] = 300,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds over which a trial sends, at least.")
    ] = 30.0,
    url: Url = "http://127.0.0.1:8000",
    model: Model = "",
    api_key: ApiKey = "",
    workload: Workload = "multi-turn",
    turns: Turns = 4,
    shared_tokens: SharedTokens = 1024,
    own_tokens: OwnTokens = 256,
    output_tokens: OutputTokens = 32,
    documents: Documents = 8,
    think: Think = 0.0,
    seed: Seed = 0,
    arm: Annotated[str, typer.Option(help="What is measured, for the result.")] = "",
    block_size: BlockSize = 16,
    vocabulary: Vocabulary = 30_000,
    warm_up: WarmUp = 2,
    prefix_cache: PrefixCache = None,
    html: Html = None,
    json: JsonTarget = None,
) -> None:
    """Find the highest rate of sessions at which a server still meets an SLO.

    Each trial is an open loop with prompts of its own. The rate is doubled while the SLO is met,
    then the gap to the lowest rate that missed it is halved until it is small. The answer is a
    rate that was tried and met the SLO, below all that missed it. A trial that the client sends
    late says nothing and ends the search.

    Exit code 1 when no rate met the SLO.
    """
    from headstart.bench.rate import Plan, search
    from headstart.bench.slo import parse_slo

    level, least = parse_slo(slo), parse_share("--slo-share", slo_share)
    if not level.limits:
        raise ConfigError("--slo is empty; name what requests have to meet, such as ttft=2s")
    plan = Plan(
        first_rate=first_rate,
        precision=parse_share("--precision", precision),
        max_trials=max_trials,
    )
    render.check_target(json)
    check_html(html)
    trials: list[Trial] = []
    try:
        with render.progress("bench rate") as progress:
            search(_measure(context.params, level, least, trials, progress), plan, trials)
    finally:  # what was found until it was interrupted is published, too
        if trials:
            document = _document(trials, plan, level, least)
            render.publish(document, json, lambda: _show(trials, plan, level))
    _finish(trials, level, html)


def _finish(trials: list[Trial], slo: Slo, html: Path | None) -> None:
    from headstart.bench.rate import best_rate

    if html is not None:
        report_runs([trial.run for trial in trials if trial.run is not None], slo, html)
    if best_rate(trials) is None:
        raise typer.Exit(EXIT_FINDING)


def _measure(
    told: Told, slo: Slo, least_share: float, trials: list[Trial], progress: render.Advance
) -> Callable[[float], Trial]:
    """What tries a rate. It raises where not even the first can be tried."""
    from msgspec import structs

    from headstart.bench.drive import Target
    from headstart.bench.rate import Outcome, Trial, judge_trial
    from headstart.bench.serve import measure, warm_up

    target = Target(url=told["url"].rstrip("/"), model=told["model"], api_key=told["api_key"])

    def measured(rate: float) -> Trial:
        load = _load(told, rate)
        title = f"trial {len(trials) + 1}, {rate:.3g} sessions/s"
        try:
            if not trials:
                warm_up(load, target)
            run = measure(
                load,
                target,
                secrets.token_hex(8),
                lambda done: progress(title, done, len(load.asks)),
            )
        except HeadstartError as error:
            if not trials:
                raise
            return Trial(rate=rate, outcome=Outcome.INVALID, reason=str(error))
        run = structs.replace(run, arm=told["arm"], has_prefix_cache=told["prefix_cache"])
        return judge_trial(rate, run, slo, least_share)

    return measured


def _load(told: Told, rate: float) -> Load:
    """Enough of the workload for a trial."""
    from dataclasses import replace

    from headstart.bench.drive import Pace
    from headstart.bench.load import Shape, make_load
    from headstart.bench.serve import Load

    shape = Shape(
        sessions=1,
        turns=told["turns"],
        shared_tokens=told["shared_tokens"],
        own_tokens=told["own_tokens"],
        output_tokens=told["output_tokens"],
        documents=told["documents"],
        think_s=told["think"],
        seed=told["seed"],
        vocabulary=told["vocabulary"],
    )
    requests_each = len(make_load(told["workload"], shape))
    sessions = max(math.ceil(told["requests"] / requests_each), math.ceil(rate * told["seconds"]))
    return Load.make(
        told["workload"],
        replace(shape, sessions=sessions),
        Pace(rate=rate, seed=told["seed"]),
        block_size=told["block_size"],
        num_warm_up=told["warm_up"],
    )


def _document(trials: list[Trial], plan: Plan, slo: Slo, least_share: float) -> dict[str, object]:
    import msgspec

    from headstart.bench.environment import describe
    from headstart.bench.rate import SCHEMA, Outcome, best_rate, is_precise, why_ended

    ran = [trial for trial in trials if trial.run is not None]
    return {
        "schema": SCHEMA,
        "environment": describe(),
        "slo": {"limits_s": dict(slo.limits), "presets": list(slo.presets), "note": slo.note},
        "slo_share": least_share,
        "precision": plan.precision,
        "best_rate": best_rate(trials),
        "is_precise": is_precise(trials, plan),
        "ended": why_ended(trials, plan),
        "trials": [
            {
                "rate": trial.rate,
                "outcome": trial.outcome,
                "is_met": trial.outcome is Outcome.MET,
                "share": trial.share,
                "reason": trial.reason,
                "run": ran.index(trial) if trial.run is not None else None,
            }
            for trial in trials
        ],
        "runs": [msgspec.to_builtins(trial.run) for trial in ran],
    }


def _show(trials: list[Trial], plan: Plan, slo: Slo) -> None:
    from headstart.bench.rate import best_rate, why_ended
    from headstart.bench.summary import SHARES, summarise, told, told_share

    titles = ("sessions/s", "outcome", "meet the SLO", "requests", "TTFT p50, ms", "TTFT p99, ms")
    rows = []
    for trial in trials:
        row = [f"{trial.rate:.4g}", str(trial.outcome), "-", "-", "-", "-"]
        if trial.run is not None:
            ttft = summarise(trial.run, slo).times["ttft"]
            row[2:4] = [told_share(trial.share), str(len(trial.run.requests))]
            row[4:] = [
                told(ttft.quantiles[each], SHARES[each], ttft.num) for each in ("p50", "p99")
            ]
        rows.append(row)
    columns = [render.Column(title=title, numeric=title != "outcome") for title in titles]
    render.print_table(columns, rows, title=f"bench rate: {slo}")
    best = best_rate(trials)
    found = "no rate met the SLO" if best is None else f"highest rate: {best:.4g} sessions/s"
    print(f"{found}; {why_ended(trials, plan)}")
    if slo.note:
        print(slo.note)
