"""Medians and their uncertainty, without assumptions about the distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class Median:
    """A median with the 95 % interval of the population's median."""

    value: float
    low: float
    high: float


def median_with_interval(samples: Sequence[float]) -> Median:
    """Median and its distribution-free 95 % interval from order statistics.

    With n samples the interval [x(k), x(n+1-k)] covers the true median with probability
    1 - 2 P(Binomial(n, 1/2) < k); k is the largest with at least 95 %. Below six samples no such k
    exists and the interval is the whole range. Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("no samples")
    ordered, n = sorted(samples), len(samples)
    tail, k = 0.0, 0
    while k < n // 2 and tail + math.comb(n, k) / 2**n <= 0.025:
        tail += math.comb(n, k) / 2**n
        k += 1
    k = max(k, 1)
    return Median(value=median(ordered), low=ordered[k - 1], high=ordered[n - k])


def quantile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
