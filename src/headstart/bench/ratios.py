"""Ratios of paired runs and how sure they are: the unit is the run, not the request.

Requests of one run share its machine, its queue and its luck, so a thousand of them are one sample
of what differs between runs. For n pairs with log ratios of mean m and standard deviation s, the
one-sided bound of the geometric mean at 95 % is

    exp(m + t(0.95, n - 1) * s / sqrt(n))

with Student's t. Times and rates are nearly log-normal from run to run, so their logs suit it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from headstart.bench.run import Request, Run
from headstart.bench.statistics import quantile

CONFIDENCE = 0.95
MAX_PAIRS = 1000
_NUM_RESAMPLED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Candidate by baseline: the geometric mean and its one-sided 95 % bounds."""

    estimate: float
    lower95: float
    upper95: float
    spread: float
    """Standard deviation of the logs."""
    num_pairs: int


def t_quantile(share: float, degrees: int) -> float:
    """The quantile of Student's t, for 0.5 <= share < 1, by bisection of its distribution."""
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < share:
        high *= 2.0
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (middle, high) if t_probability(middle, degrees) < share else (low, middle)
    return high


def t_probability(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0: the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    theta = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(theta), math.sin(theta)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for n in range(2 + odd, degrees, 2):
        term *= cosine * cosine * (n - 1) / n
        total += term
    within = (theta + sine * total) * 2.0 / math.pi if odd else sine * total
    return 0.5 + within / 2.0


def ratio_of(ratios: Sequence[float]) -> Ratio:
    """Of at least two pairs. Raises ValueError for fewer, or where one is not positive."""
    logs = [math.log(ratio) for ratio in ratios]
    if len(logs) < 2:
        raise ValueError("a spread needs two pairs")
    mean, spread = fmean(logs), stdev(logs)
    reach = t_quantile(CONFIDENCE, len(logs) - 1) * spread / math.sqrt(len(logs))
    return Ratio(
        estimate=math.exp(mean),
        lower95=math.exp(mean - reach),
        upper95=math.exp(mean + reach),
        spread=spread,
        num_pairs=len(logs),
    )


def pairs_needed(ratio: Ratio, bound: float) -> int | None:
    """Pairs in all after which the bound would be decided, if things stay as they are.

    None: not within `MAX_PAIRS`.
    """
    distance = abs(math.log(ratio.estimate / bound))
    for count in range(ratio.num_pairs, MAX_PAIRS + 1):
        if t_quantile(CONFIDENCE, count - 1) * ratio.spread / math.sqrt(count) <= distance:
            return count
    return None


def resampled_p50_bounds(pairs: Sequence[tuple[Run, Run]], *, seed: int = 0) -> tuple[float, float]:
    """One-sided 95 % bounds of the geometric mean of p50 TTFT ratios, by a bootstrap.

    Pairs are drawn, and in each whole sessions, the same for both of its runs where they have the
    same: it assumes nothing about distributions. With few pairs it is narrower than Student's t.
    """
    rng = random.Random(seed)
    grouped = [(_by_session(one), _by_session(other)) for one, other in pairs]
    means = []
    for _ in range(_NUM_RESAMPLED):
        drawn = rng.choices(grouped, k=len(grouped))
        means.append(math.exp(fmean(_drawn_log_ratio(rng, *pair) for pair in drawn)))
    return quantile(means, 1.0 - CONFIDENCE), quantile(means, CONFIDENCE)


def _by_session(run: Run) -> dict[str, list[float]]:
    sessions: dict[str, list[float]] = {}
    for request in run.good:
        assert request.ttft_s is not None
        sessions.setdefault(request.session, []).append(request.ttft_s)
    return sessions


def _drawn_log_ratio(
    rng: random.Random, one: dict[str, list[float]], other: dict[str, list[float]]
) -> float:
    names = list(one)
    drawn = rng.choices(names, k=len(names))
    others = drawn if one.keys() == other.keys() else rng.choices(list(other), k=len(other))
    return math.log(_p50(other, others) / _p50(one, drawn))


def _p50(sessions: dict[str, list[float]], drawn: Sequence[str]) -> float:
    return quantile([time for name in drawn for time in sessions[name]], 0.5)


def good_share(run: Run, is_met: Callable[[Request], bool]) -> float:
    """Share of the requests that were sent and meet something: failures do not."""
    return sum(r.is_good and is_met(r) for r in run.requests) / len(run.requests)
