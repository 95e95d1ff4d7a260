"""The search for the highest rate, against servers that are functions."""

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.bench.rate import (
    Outcome,
    Plan,
    Trial,
    best_rate,
    is_precise,
    judge_trial,
    next_rate,
    search,
    why_ended,
)
from headstart.bench.slo import parse_slo
from headstart.errors import ConfigError

RATES = st.floats(0.01, 1000.0)


def searched(is_met, plan):
    """All trials against a server that meets the SLO where `is_met` says so."""
    trials = []

    def measure(rate):
        return Trial(rate=rate, outcome=Outcome.MET if is_met(rate) else Outcome.MISSED)

    search(measure, plan, trials)
    return trials


@given(RATES, RATES, st.floats(0.01, 0.5))
def test_what_is_found_is_within_the_precision(limit, first, precision):
    plan = Plan(first_rate=first, precision=precision, max_trials=60)
    trials = searched(lambda rate: rate <= limit, plan)
    best = best_rate(trials)
    assert best <= limit < best * (1.0 + precision)
    assert is_precise(trials, plan)
    assert "found within" in why_ended(trials, plan)
    steps = abs(math.log2(limit / first)) + math.log2(math.log(2) / math.log1p(precision))
    assert len(trials) <= steps + 4, "doubling, then halving"


@given(st.integers(0, 10**6), st.floats(0.0, 1.0), st.integers(1, 30))
def test_luck_ends_and_never_claims_a_rate_that_missed(seed, chance, max_trials):
    rng = random.Random(seed)
    plan = Plan(first_rate=1.0, max_trials=max_trials)
    trials = searched(lambda rate: rng.random() < chance, plan)
    assert 1 <= len(trials) <= max_trials
    assert len({trial.rate for trial in trials}) == len(trials), "none is tried twice"
    best = best_rate(trials)
    missed = [trial.rate for trial in trials if trial.outcome is Outcome.MISSED]
    if best is not None:
        assert best in [trial.rate for trial in trials if trial.outcome is Outcome.MET]
        assert all(best < rate for rate in missed)
    assert next_rate(trials, plan) is None


def test_it_grows_by_doubling_and_then_halves_the_gap():
    trials = searched(lambda rate: rate <= 5.0, Plan(first_rate=1.0, precision=0.2))
    rates = [trial.rate for trial in trials]
    assert rates[:4] == [1.0, 2.0, 4.0, 8.0]
    assert rates[4] == pytest.approx(math.sqrt(32))
    assert rates[5] == pytest.approx(math.sqrt(4.0 * rates[4]))


def test_a_server_that_never_or_always_meets_it_ends_by_the_number_of_trials():
    plan = Plan(max_trials=5)
    never = searched(lambda rate: False, plan)
    assert [trial.rate for trial in never] == [1.0, 0.5, 0.25, 0.125, 0.0625]
    assert (best_rate(never), is_precise(never, plan)) == (None, False)
    always = searched(lambda rate: True, plan)
    assert (best_rate(always), is_precise(always, plan)) == (16.0, False)
    assert why_ended(always, plan) == "5 trials were made"


def test_an_invalid_trial_ends_it_with_what_is_known():
    trials = []

    def measure(rate):
        outcome = Outcome.MET if rate < 4.0 else Outcome.INVALID
        return Trial(rate=rate, outcome=outcome, reason="the client sent late")

    search(measure, Plan(), trials)
    assert [trial.rate for trial in trials] == [1.0, 2.0, 4.0]
    assert best_rate(trials) == 2.0
    assert why_ended(trials, Plan()) == "a trial was invalid: the client sent late"
    assert why_ended(trials[:2], Plan()) == "interrupted"


def test_lower_rates_are_not_tried_where_requests_alone_miss(run):
    """Of 41 requests, in 400 s, half are slower than 1 s; 0.1 are at once on average."""
    plan, made = Plan(least_share=0.9), run(1.0, count=41, duration_s=400.0)

    def ended(slo="ttft=1s", **changed):
        trials = [judge_trial(2.0, msgspec.structs.replace(made, **changed), parse_slo(slo), 0.9)]
        return trials[0].outcome, next_rate(trials, plan), why_ended(trials, plan)

    outcome, rate, why = ended()
    assert (outcome, rate) == (Outcome.MISSED, None)
    assert "lower rates would not help" in why
    assert ended(duration_s=60.0)[1] == 1.0, "they may have met each other"
    assert ended("ttft=100s")[1] == 4.0
    failed = tuple(
        msgspec.structs.replace(r, error="HTTP 503", ttft_s=None, latency_s=None) if n % 2 else r
        for n, r in enumerate(made.requests)
    )
    assert ended("ttft=100s", requests=failed)[1] == 1.0, "a lower rate may fail less"
    assert ended("ttft=100s", requests=failed, duration_s=4000.0)[1] is None


def test_a_trial_is_judged_by_its_requests(run):
    slo = parse_slo("ttft=1s")
    made = run(1.0, count=41)
    share = sum(r.ttft_s <= 1.0 for r in made.requests) / 41
    assert judge_trial(2.0, made, slo, share).outcome is Outcome.MET
    missed = judge_trial(2.0, made, slo, share + 0.01)
    assert (missed.outcome, missed.share, missed.rate) == (Outcome.MISSED, share, 2.0)
    late = tuple(msgspec.structs.replace(r, sent_s=r.intended_s + 0.06) for r in made.requests)
    invalid = judge_trial(2.0, msgspec.structs.replace(made, requests=late), slo, 0.0)
    assert invalid.outcome is Outcome.INVALID
    assert "the client sent late, by 60.0 ms" in invalid.reason
    failed = tuple(
        msgspec.structs.replace(r, error="HTTP 500", ttft_s=None, latency_s=None) for r in late
    )
    nothing = judge_trial(2.0, msgspec.structs.replace(made, requests=failed), slo, 0.5)
    assert (nothing.outcome, nothing.share) == (Outcome.MISSED, 0.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"first_rate": 0.0}, "a first rate of 0.0"),
        ({"first_rate": math.inf}, "a first rate of inf"),
        ({"precision": 0.0}, "a precision of 0.0; it is 0.1% to 100%"),
        ({"max_trials": 0}, "at least one is needed"),
    ],
)
def test_a_plan_that_is_none_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Plan(**wrong)
