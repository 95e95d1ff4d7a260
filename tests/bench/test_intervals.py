"""Intervals of quantiles: by their definition, by simulation, and against a bootstrap."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.bench.intervals import estimate, num_needed
from headstart.bench.statistics import median_with_interval, quantile

SIGMA = 0.9


def lognormal(rng, num_sessions, num_each, likeness):
    """Times whose logs have in each session a common part: `likeness` of their variance."""
    common = rng.normal(size=(num_sessions, 1)) * math.sqrt(likeness)
    own = rng.normal(size=(num_sessions, num_each)) * math.sqrt(1.0 - likeness)
    return np.exp(SIGMA * (common + own)).ravel(), np.repeat(np.arange(num_sessions), num_each)


def truth(share):
    return math.exp(SIGMA * NormalDist().inv_cdf(share))


def alone(samples):
    return np.array(samples, dtype=float), np.arange(len(samples))


def test_the_median_of_independent_samples_has_the_interval_of_its_order_statistics():
    rng = np.random.default_rng(1)
    for count in (6, 7, 20, 101, 1000):
        samples = rng.lognormal(size=count)
        found, known = estimate(*alone(samples), 0.5), median_with_interval(list(samples))
        assert (found.low, found.high) == (known.low, known.high)


@pytest.mark.parametrize("share", [0.9, 0.99])
def test_a_quantile_is_told_where_samples_lie_beyond_it(share):
    needed = num_needed(share)
    assert share**needed <= 0.025 < share ** (needed - 1)
    rng = np.random.default_rng(2)
    samples = np.sort(rng.lognormal(size=needed))
    assert estimate(*alone(samples[1:]), share) is None
    found = estimate(*alone(samples), share)
    assert found.high == samples[-1], "only the largest is surely above it"
    assert found.low < found.value <= found.high


def test_a_median_is_told_of_any_samples_but_its_interval_is_not():
    found = estimate(*alone([3.0, 1.0, 2.0]), 0.5)
    assert (found.value, found.low, found.high) == (2.0, None, None)
    assert estimate(*alone([]), 0.5) is None


def test_one_session_says_nothing_of_others():
    samples = np.arange(1.0, 1001.0)
    found = estimate(samples, np.zeros(1000, dtype=int), 0.5)
    assert (found.value, found.low, found.high) == (500.0, None, None)


@given(
    st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=300),
    st.integers(1, 40),
    st.sampled_from([0.5, 0.9]),
    st.floats(0.01, 100.0),
)
def test_the_value_is_the_quantile_lies_within_and_knows_no_unit(samples, sessions, share, factor):
    times, names = np.array(samples), np.arange(len(samples)) % sessions
    found, scaled = estimate(times, names, share), estimate(times * factor, names, share)
    if found is None:
        assert len(samples) < num_needed(share)
        return
    assert found.value == quantile(samples, share)
    assert scaled.value == pytest.approx(found.value * factor)
    if found.low is not None:
        assert found.low <= found.value <= found.high
        assert (scaled.low, scaled.high) == (
            pytest.approx(found.low * factor),
            pytest.approx(found.high * factor),
        )


@pytest.mark.parametrize("times", [2, 10])
def test_saying_the_same_again_makes_nothing_surer(times):
    samples, sessions = lognormal(np.random.default_rng(3), 60, 5, 0.3)
    once = estimate(samples, sessions, 0.5)
    again = estimate(np.repeat(samples, times), np.repeat(sessions, times), 0.5)
    assert again.value == once.value
    assert again.low <= once.low * 1.01
    assert again.high >= once.high * 0.99


@pytest.mark.parametrize(
    ("num_sessions", "num_each", "likeness", "share"),
    [
        (100, 1, 0.0, 0.5),
        (100, 1, 0.0, 0.9),
        (500, 1, 0.0, 0.99),
        (12, 20, 0.3, 0.5),
        (20, 20, 0.8, 0.5),
        (20, 20, 0.3, 0.9),
        (40, 10, 0.8, 0.9),
        (100, 10, 0.3, 0.99),
    ],
)
def test_the_truth_lies_within_nineteen_times_of_twenty(num_sessions, num_each, likeness, share):
    rng = np.random.default_rng(4)
    told = below = above = 0
    for _ in range(600):
        found = estimate(*lognormal(rng, num_sessions, num_each, likeness), share)
        if found.low is not None:
            told += 1
            below += truth(share) < found.low
            above += truth(share) > found.high
    assert told > 300
    # 95 % less three standard errors of 600 simulations; ranks are whole, so often more.
    assert 1.0 - (below + above) / told >= 0.923
    assert max(below, above) / told <= 0.05


def bootstrap(samples, sessions, share, rng, num=300):
    """The usual interval: of the quantiles of whole sessions that are drawn again and again."""
    order = np.argsort(samples)
    ordered, of = samples[order], sessions[order]
    count = sessions.max() + 1
    drawn = np.empty(num)
    for number in range(num):
        weights = np.bincount(rng.integers(0, count, count), minlength=count)
        ranks = np.cumsum(weights[of])
        drawn[number] = ordered[np.searchsorted(ranks, math.ceil(share * ranks[-1]))]
    return np.quantile(drawn, [0.025, 0.975])


@pytest.mark.parametrize(("num_sessions", "num_each"), [(400, 1), (60, 8)])
def test_a_bootstrap_over_sessions_agrees_on_the_median(num_sessions, num_each):
    rng = np.random.default_rng(5)
    ours, theirs = [], []
    for _ in range(40):
        drawn = lognormal(rng, num_sessions, num_each, 0.5 if num_each > 1 else 0.0)
        found = estimate(*drawn, 0.5)
        low, high = bootstrap(*drawn, 0.5, rng)
        ours.append(math.log(found.high / found.low))
        theirs.append(math.log(high / low))
    assert np.median(ours) == pytest.approx(np.median(theirs), rel=0.15)


def test_where_a_bootstrap_is_too_sure_of_the_tail_this_is_not():
    rng = np.random.default_rng(6)
    ours = theirs = 0
    for _ in range(120):
        drawn = lognormal(rng, 100, 10, 0.8)
        found = estimate(*drawn, 0.99)
        low, high = bootstrap(*drawn, 0.99, rng)
        ours += found.low is None or found.low <= truth(0.99) <= found.high
        theirs += low <= truth(0.99) <= high
    assert theirs / 120 < 0.9 < ours / 120
