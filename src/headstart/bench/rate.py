"""The highest rate at which a server meets its SLO: which rate to try next, and what is known.

From a first rate it is doubled while the SLO is met (or halved until it is), then the gap between
the highest rate that met it and the lowest that missed it is halved, on a logarithmic scale, until
it is small enough. Whatever the trials say, the answer lies below every rate that missed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headstart.bench.run import Run
from headstart.bench.slo import Slo
from headstart.bench.summary import summarise
from headstart.errors import ConfigError

SCHEMA = "headstart.bench.rate/1"


_IDLE = 0.05


class Outcome(enum.StrEnum):
    """What a trial shows."""

    MET = "met"
    MISSED = "missed"
    INVALID = "invalid"
    """Nothing of the server: it ends the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to search. Raises ConfigError."""

    first_rate: float = 1.0
    """Sessions that start a second."""
    precision: float = 0.05
    """The answer and the next rate that missed differ by at most this share."""
    max_trials: int = 16
    least_share: float = 0.99
    """Of the requests, that meet the SLO."""

    def __post_init__(self) -> None:
        if not 0.0 < self.first_rate < math.inf:
            raise ConfigError(f"a first rate of {self.first_rate} sessions a second")
        if not 0.001 <= self.precision <= 1.0:
            raise ConfigError(f"a precision of {self.precision}; it is 0.1% to 100%")
        if self.max_trials < 1:
            raise ConfigError(f"{self.max_trials} trials; at least one is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One rate that was tried."""

    rate: float
    outcome: Outcome
    share: float | None = None
    """Of the requests, that met the SLO; None: nothing was sent."""
    reason: str = ""
    """Why it is invalid."""
    run: Run | None = None


def is_hopeless(trial: Trial, plan: Plan) -> bool:
    """Whether a rate missed, and lower ones would as well.

    At most as many requests have met another one as there are at once on average (Little's law),
    and only those can become faster. What fails at a server that is nearly idle, will fail.
    """
    if trial.outcome is not Outcome.MISSED or trial.run is None or trial.share is None:
        return False
    at_once = sum(r.latency_s or 0.0 for r in trial.run.good) / trial.run.duration_s
    late = len(trial.run.good) / len(trial.run.requests) - trial.share
    return at_once < _IDLE or late > 1.0 - plan.least_share + at_once


def best_rate(trials: Sequence[Trial]) -> float | None:
    """The highest rate that met the SLO, below all that missed it; None: none is known."""
    missed = min((t.rate for t in trials if t.outcome is Outcome.MISSED), default=math.inf)
    met = (t.rate for t in trials if t.outcome is Outcome.MET and t.rate < missed)
    return max(met, default=None)


def is_precise(trials: Sequence[Trial], plan: Plan) -> bool:
    """Whether a rate missed that is hardly higher than the best."""
    best = best_rate(trials)
    missed = min((t.rate for t in trials if t.outcome is Outcome.MISSED), default=math.inf)
    return best is not None and missed <= best * (1.0 + plan.precision)


def next_rate(trials: Sequence[Trial], plan: Plan) -> float | None:
    """The rate to try after those; None: the search has ended."""
    if not trials:
        return plan.first_rate
    is_over = len(trials) >= plan.max_trials or trials[-1].outcome is Outcome.INVALID
    if is_over or is_precise(trials, plan):
        return None
    best = best_rate(trials)
    missed = [t.rate for t in trials if t.outcome is Outcome.MISSED]
    if best is None:
        return None if is_hopeless(trials[-1], plan) else min(missed) / 2.0
    return math.sqrt(best * min(missed)) if missed else best * 2.0


def search(
    measure: Callable[[float], Trial],
    plan: Plan,
    trials: list[Trial],
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Try rates until nothing is left to try; each trial is appended to `trials`, then `keep`."""
    while (rate := next_rate(trials, plan)) is not None:
        trials.append(measure(rate))
        keep()


def judge_trial(rate: float, run: Run, slo: Slo, least_share: float) -> Trial:
    """What a run at a rate shows."""
    share = summarise(run, slo).slo_share
    assert share is not None
    if run.is_sent_late:
        lag_ms = (run.send_lag_s or 0.0) * 1000.0
        reason = f"the client sent late, by {lag_ms:.1f} ms (p99): it is the bottleneck"
        return Trial(rate=rate, outcome=Outcome.INVALID, share=share, reason=reason, run=run)
    outcome = Outcome.MET if share >= least_share else Outcome.MISSED
    return Trial(rate=rate, outcome=outcome, share=share, run=run)


def why_ended(trials: Sequence[Trial], plan: Plan) -> str:
    """For people."""
    if trials and trials[-1].outcome is Outcome.INVALID:
        return f"a trial was invalid: {trials[-1].reason}"
    if is_precise(trials, plan):
        return f"found within {plan.precision:.3g} of it"
    if trials and best_rate(trials) is None and is_hopeless(trials[-1], plan):
        return "requests that were alone at the server missed it, too: lower rates would not help"
    if len(trials) >= plan.max_trials:
        return f"{plan.max_trials} trials were made"
    return "interrupted"
