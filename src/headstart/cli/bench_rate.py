"""`headstart bench rate`: the highest rate at which a server meets an SLO."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from headstart import render
from headstart.cli.bench_report import ReportOptions
from headstart.cli.bench_serve import (
    ApiKey,
    Model,
    PrefixCache,
    Url,
    WarmUp,
    base_url,
    end_on_signals,
)
from headstart.cli.load_options import ShapeOptions, TraceOptions
from headstart.cli.options import JsonTarget, grouped, parse_share
from headstart.errors import ConfigError, HeadstartError

if TYPE_CHECKING:
    from headstart.bench.drive import Target
    from headstart.bench.load import Ask
    from headstart.bench.rate import Plan, Trial
    from headstart.bench.run import Run
    from headstart.bench.serve import Load
    from headstart.bench.slo import Slo

EXIT_FINDING = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What is searched, and how exactly."""

    slo_share: Annotated[
        str, typer.Option(help="Share of the requests that have to meet the SLO.")
    ] = "99%"
    first_rate: Annotated[
        float, typer.Option(min=1e-6, help="The first to try: sessions that start a second.")
    ] = 1.0
    precision: Annotated[
        str, typer.Option(help="How near the answer has to be to a rate that misses.")
    ] = "5%"
    max_trials: Annotated[int, typer.Option(min=1, help="Rates to try at most.")] = 16

    def plan(self) -> Plan:
        """Raises ConfigError."""
        from headstart.bench.rate import Plan

        return Plan(
            first_rate=self.first_rate,
            precision=parse_share("--precision", self.precision),
            max_trials=self.max_trials,
            least_share=parse_share("--slo-share", self.slo_share),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions(ShapeOptions):
    """What is sent in each trial."""

    requests: Annotated[int, typer.Option(min=1, help="Requests of a trial, at least.")] = 300
    seconds: Annotated[
        float, typer.Option(min=0.0, max=1e6, help="Seconds over which a trial sends, at least.")
    ] = 30.0
    processes: Annotated[
        int, typer.Option(min=1, max=256, help="Client processes that share the sessions.")
    ] = 1

    def load(self, rate: float, traced: TraceOptions) -> Load:
        """Enough of the workload for a trial at a rate. Raises ConfigError."""
        from headstart.bench.drive import Pace
        from headstart.bench.serve import Load

        one = traced.asks(self.workload, self.shape(1))
        if traced.trace is None:
            num_sessions = self._num_sessions(rate, len(one))
            asks = traced.asks(self.workload, self.shape(num_sessions))
        else:
            asks = self._first(one, rate)
        return Load(
            workload=self.workload,
            shape=self.shape(1),
            pace=Pace(rate=rate, processes=self.processes, seed=self.seed),
            asks=tuple(asks),
            block_size=self.block_size,
            told=traced.told(),
        )

    def _first(self, asks: list[Ask], rate: float) -> list[Ask]:
        """The first sessions of a trace that are enough, or all of it."""
        if len(asks) < self.requests:
            raise ConfigError(
                f"the trace has {len(asks)} requests, and a trial {self.requests}: take more of "
                "it, or --requests of less"
            )
        sizes: dict[str, int] = {}
        for ask in asks:
            sizes[ask.session] = sizes.get(ask.session, 0) + 1
        chosen: set[str] = set()
        num_requests = 0
        for session, size in sizes.items():
            if num_requests >= self.requests and len(chosen) >= rate * self.seconds:
                break
            chosen.add(session)
            num_requests += size
        return [ask for ask in asks if ask.session in chosen]

    def _num_sessions(self, rate: float, requests_each: int) -> int:
        return max(math.ceil(self.requests / requests_each), math.ceil(rate * self.seconds))


@grouped
def rate(
    sought: SearchOptions,
    shown: ReportOptions,
    trial: TrialOptions,
    traced: TraceOptions,
    url: Url = "http://127.0.0.1:8000",
    model: Model = "",
    api_key: ApiKey = "",
    warm_up: WarmUp = 2,
    arm: Annotated[str, typer.Option(help="What is measured, for the result.")] = "",
    prefix_cache: PrefixCache = None,
    json: JsonTarget = None,
) -> None:
    """Find the highest rate of sessions at which a server still meets an SLO.

    Each trial is an open loop with prompts of its own. The rate is doubled while the SLO is met,
    then the gap to the lowest rate that missed it is halved until it is small. The answer is a
    rate that was tried and met the SLO, below all that missed it. A trial that the client sends
    late says nothing and ends the search.

    Exit code 1 when no rate met the SLO.
    """
    from msgspec import structs

    from headstart.bench.arms import check_name
    from headstart.bench.drive import Target
    from headstart.bench.rate import best_rate, search

    slo, plan = shown.checked(), sought.plan()
    if not slo.limits:
        raise ConfigError("name with --slo what requests have to meet, such as ttft=2s,tpot=100ms")
    if arm:
        check_name(arm)
    render.check_target(json)
    end_on_signals()
    target = Target(url=base_url(url), model=model, api_key=api_key)
    trials: list[Trial] = []

    def run(rate: float, advance: render.Advance) -> Run:
        load, number = trial.load(rate, traced), len(trials) + 1
        found = _run(load, target, number, 0 if trials else warm_up, advance)
        return structs.replace(found, arm=arm, has_prefix_cache=prefix_cache)

    def keep() -> None:
        render.save(_document(trials, plan, slo), json)

    try:
        with render.progress("bench rate") as progress:
            search(_tried(lambda rate: run(rate, progress), slo, plan, trials), plan, trials, keep)
    finally:  # what was found until it was interrupted is published, too
        if trials:
            render.publish(_document(trials, plan, slo), json, lambda: _show(trials, plan, slo))
    shown.write([each.run for each in trials if each.run is not None], slo)
    if best_rate(trials) is None:
        raise typer.Exit(EXIT_FINDING)


def _run(load: Load, target: Target, number: int, num_warm_up: int, advance: render.Advance) -> Run:
    from headstart.bench.serve import measure, warm_up

    warm_up(replace(load, num_warm_up=num_warm_up), target)
    title, count = f"trial {number}, {load.pace.rate:.3g} sessions/s", len(load.asks)
    return measure(load, target, secrets.token_hex(8), lambda done: advance(title, done, count))


def _tried(
    run: Callable[[float], Run], slo: Slo, plan: Plan, trials: list[Trial]
) -> Callable[[float], Trial]:
    """What tries a rate. It raises where not even the first can be tried."""
    from headstart.bench.rate import Outcome, Trial, judge_trial

    def tried(rate: float) -> Trial:
        try:
            return judge_trial(rate, run(rate), slo, plan.least_share)
        except HeadstartError as error:
            if not trials:
                raise
            return Trial(rate=rate, outcome=Outcome.INVALID, reason=str(error))

    return tried


def _document(trials: list[Trial], plan: Plan, slo: Slo) -> dict[str, object]:
    import msgspec

    from headstart.bench.environment import describe
    from headstart.bench.rate import SCHEMA, Outcome, best_rate, is_precise, why_ended

    ran = [trial for trial in trials if trial.run is not None]
    return {
        "schema": SCHEMA,
        "environment": describe(),
        "slo": {"limits_s": dict(slo.limits), "presets": list(slo.presets), "note": slo.note},
        "slo_share": plan.least_share,
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
