"""Bounds of ratios: against tables, against their definition, and against simulated campaigns."""

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.bench.ratios import (
    MAX_PAIRS,
    Ratio,
    pairs_needed,
    ratio_of,
    resampled_p50_bounds,
    t_probability,
    t_quantile,
)

# Upper 5 % and 2.5 % points of Student's t, from printed tables.
TABLE = {
    1: (6.314, 12.706),
    2: (2.920, 4.303),
    3: (2.353, 3.182),
    4: (2.132, 2.776),
    5: (2.015, 2.571),
    9: (1.833, 2.262),
    10: (1.812, 2.228),
    30: (1.697, 2.042),
    120: (1.658, 1.980),
}


@pytest.mark.parametrize("degrees", TABLE)
def test_students_t_is_as_in_the_tables(degrees):
    for share, value in zip((0.95, 0.975), TABLE[degrees], strict=True):
        assert t_quantile(share, degrees) == pytest.approx(value, abs=6e-4)
        assert t_probability(t_quantile(share, degrees), degrees) == pytest.approx(share)


def test_the_bounds_are_students():
    ratio = ratio_of([0.5, 0.6, 0.7])
    logs = [math.log(each) for each in (0.5, 0.6, 0.7)]
    mean = sum(logs) / 3
    spread = math.sqrt(sum((each - mean) ** 2 for each in logs) / 2)
    assert ratio.estimate == pytest.approx(math.exp(mean))
    assert ratio.upper95 == pytest.approx(math.exp(mean + 2.920 * spread / math.sqrt(3)), rel=1e-3)
    assert ratio.estimate / ratio.lower95 == pytest.approx(ratio.upper95 / ratio.estimate)


@given(st.lists(st.floats(0.01, 100.0), min_size=2, max_size=12), st.floats(0.1, 10.0))
def test_a_ratio_knows_no_unit_and_no_direction(ratios, factor):
    ratio, scaled = ratio_of(ratios), ratio_of([each * factor for each in ratios])
    inverse = ratio_of([1.0 / each for each in ratios])
    assert scaled.upper95 == pytest.approx(ratio.upper95 * factor, rel=1e-6)
    assert inverse.lower95 == pytest.approx(1.0 / ratio.upper95, rel=1e-6)
    assert ratio.lower95 <= ratio.estimate * (1 + 1e-12)


@pytest.mark.parametrize("ratios", [[], [0.5], [0.5, 0.0], [0.5, -1.0]])
def test_what_has_no_spread_or_no_logarithm_is_refused(ratios):
    with pytest.raises(ValueError, match=r"pairs|domain|positive"):
        ratio_of(ratios)


def campaign(rng, true_ratio, cv, num_pairs=5):
    """Ratios of the medians of pairs of runs, each of which is off by its own luck."""
    return [
        true_ratio * math.exp(rng.gauss(0.0, cv)) / math.exp(rng.gauss(0.0, cv))
        for _ in range(num_pairs)
    ]


@pytest.mark.parametrize("cv", [0.03, 0.06])
def test_what_just_misses_is_let_through_one_time_in_twenty(cv):
    rng = random.Random(7)
    passed = sum(ratio_of(campaign(rng, 0.75, cv)).upper95 <= 0.75 for _ in range(2000))
    assert 0.035 <= passed / 2000 <= 0.06


@pytest.mark.parametrize(("true_ratio", "cv", "least"), [(0.65, 0.03, 0.95), (0.6, 0.06, 0.9)])
def test_what_is_good_passes(true_ratio, cv, least):
    rng = random.Random(8)
    passed = sum(ratio_of(campaign(rng, true_ratio, cv)).upper95 <= 0.75 for _ in range(2000))
    assert passed / 2000 >= least


def test_so_many_pairs_as_are_said_to_be_needed_decide_it():
    rng = random.Random(9)
    ratio = ratio_of(campaign(rng, 0.72, 0.06))
    assert ratio.upper95 > 0.75 > ratio.estimate
    needed = pairs_needed(ratio, 0.75)
    assert needed is not None
    assert 5 < needed < 100
    for count, expected in ((needed - 1, False), (needed, True)):
        reach = t_quantile(0.95, count - 1) * ratio.spread / math.sqrt(count)
        assert (ratio.estimate * math.exp(reach) <= 0.75) is expected


def test_no_number_of_pairs_decides_what_lies_on_the_bound():
    even = Ratio(estimate=0.75, lower95=0.7, upper95=0.8, spread=0.05, num_pairs=5)
    assert pairs_needed(even, 0.75) is None
    assert t_quantile(0.95, MAX_PAIRS) > 1.6


def test_the_bootstrap_agrees_and_draws_whole_sessions(run):
    pairs = [(run(seed=2 * n), run(0.5 + 0.02 * n, seed=2 * n + 1)) for n in range(5)]
    low, high = resampled_p50_bounds(pairs)
    assert low < 0.54 < high
    assert low > 0.3
    assert high < 0.8
    assert resampled_p50_bounds(pairs) == (low, high), "a seed"
    # With every request of a run in one session, nothing but the pairs is left to draw.
    alone = [(_one_session(one), _one_session(other)) for one, other in pairs]
    lower, higher = resampled_p50_bounds(alone)
    assert lower >= 0.5
    assert higher <= 0.58


def _one_session(run):
    requests = tuple(msgspec.structs.replace(r, session="one") for r in run.requests)
    return msgspec.structs.replace(run, requests=requests)
