"""Cost models: the formulas, what is learnt from how much, and what must not be believed."""

import math
import pickle
import random
from dataclasses import replace
from itertools import product, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.costs import EngineCosts, EngineModel, ReadCosts, ReadModel, num_pairs
from headstart.errors import ConfigError

LIMITS = {"max_step_tokens": 8192, "copy_bytes_per_s": 1e10}
TRUE = EngineCosts(step_s=5e-3, token_s=4e-5, pair_s=2e-9, uncertainty=0.0, **LIMITS)
PRIOR = replace(TRUE, step_s=1e-3, token_s=1e-4, pair_s=1e-8, uncertainty=0.4, copy_bytes_per_s=2e9)
"""What is believed at first: wrong in size, and in every ratio."""

PREFILLS = [(0, 128), (0, 512), (2048, 4096), (0, 8192), (16000, 16256), (8192, 16384)]
DECODES = [(500, 501), (3000, 3032), (0, 16)]
MIX = [*PREFILLS, *DECODES, (0, 1024), (0, 2048), (4096, 4352), (9000, 9300), (0, 4096)]
"""Steps: tokens cached, and tokens computed up to."""

SIZES = [1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26]
AS_EVER = repeat(1.0)
GARBAGE = [0.0, -0.01, math.nan, math.inf, -math.inf]


def noise(seed, share=0.1, *, every_fifth=1.0):
    """What steps take, against what they should: without end."""
    random_ = random.Random(seed)
    while True:
        for times in (1.0, 1.0, 1.0, 1.0, every_fifth):
            yield times * random_.uniform(1.0 - share, 1.0 + share)


def run(model, steps, times=AS_EVER, *, costs=TRUE):
    """Let an engine of these costs, times `times`, compute these steps."""
    for (cached, end), factor in zip(steps, times, strict=False):
        tokens, pairs = end - cached, num_pairs(cached, end - cached)
        model.step(tokens, pairs, (costs.step_s + costs.work_s(tokens, pairs)) * factor)


def learnt(steps, times=AS_EVER, **options):
    model = EngineModel(PRIOR)
    run(model, steps, times, **options)
    return model


def worst_error(costs):
    """Of any prompt of 128 to 16384 tokens, relative."""
    sizes = [1 << power for power in range(7, 15)]
    return max(abs(costs.prefill_s(0, n) / TRUE.prefill_s(0, n) - 1) for n in sizes)


def device_s(nbytes, *, slower=1.0):
    """What a device of 1 ms and 1 GB/s takes."""
    return slower * (1e-3 + nbytes / 1e9)


def read(model, num_reads, *, slower=1.0):
    for _ in range(num_reads):
        nbytes = SIZES[model.num_observed % len(SIZES)]
        model.observe(nbytes, device_s(nbytes, slower=slower))


def times_slower(model, nbytes=1 << 24):
    """What the model predicts, against what the device takes when all is well."""
    return model.costs().read_s(nbytes) / device_s(nbytes)


@pytest.fixture
def reader():
    """A model that has seen a device well."""
    model = ReadModel()
    read(model, 20)
    return model


# ------------------------------------------------------------------------------------ formulas


def test_every_new_token_attends_to_the_cached_ones_and_to_half_of_the_new_ones():
    assert num_pairs(0, 10) == 50
    assert num_pairs(100, 10) == 1050
    assert num_pairs(0, 30) + num_pairs(30, 70) == num_pairs(0, 100)


def test_prefill_is_the_sum_of_steps_tokens_and_pairs():
    costs = replace(TRUE, step_s=1.0, token_s=0.01, pair_s=0.0001, copy_bytes_per_s=50.0)
    assert costs.prefill_s(0, 100) == pytest.approx(1.0 + 1.0 + 0.5)
    assert costs.prefill_s(200, 300) == pytest.approx(1.0 + 1.0 + 2.5)
    assert costs.work_s(300, 70_000.0) == pytest.approx(3.0 + 7.0)
    assert costs.copy_s(200) == 4.0


@pytest.mark.parametrize(("num_tokens", "steps"), [(0, 0), (1, 1), (100, 1), (101, 2), (950, 10)])
def test_a_long_prompt_takes_several_steps_and_no_new_token_takes_none(num_tokens, steps):
    costs = replace(TRUE, step_s=1.0, token_s=0.0, pair_s=0.0, max_step_tokens=100)
    assert costs.prefill_s(0, num_tokens) == steps
    assert costs.prefill_s(5000, 5000 + num_tokens) == steps
    assert costs.prefill_s(5000, num_tokens) == 0.0


def test_a_read_waits_for_the_bytes_before_it():
    costs = ReadCosts(fixed_s=0.5, bytes_per_s=100.0, ahead_nbytes=300, lag_nbytes=999)
    assert costs.read_s(200) == 0.5 + 5.0
    assert costs.read_s(0) == 0.0, "nothing waits for nothing"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *product(("step_s", "token_s", "pair_s", "uncertainty"), (-1e-9, math.nan, math.inf)),
        *product(("copy_bytes_per_s",), (0.0, -1.0, math.nan)),
        *product(("max_step_tokens",), (0, -1)),
    ],
)
def test_what_no_engine_costs_is_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field}={value}.* must "):
        replace(TRUE, **{field: value})


# ------------------------------------------------------------------------------- what is learnt


def test_an_engine_that_has_done_nothing_costs_what_was_believed():
    model = EngineModel(PRIOR)
    assert model.costs == PRIOR
    assert model.num_observed == 0


@pytest.mark.parametrize("times", [0.01, 1.0, 300.0])
@pytest.mark.parametrize("step", [*PREFILLS, *DECODES], ids=str)
def test_one_step_scales_what_was_believed(step, times):
    costs = learnt([step], [times], costs=PRIOR).costs
    for name in ("step_s", "token_s", "pair_s"):
        assert getattr(costs, name) == pytest.approx(times * getattr(PRIOR, name))


@pytest.mark.parametrize("num_steps", [8, 11, 14])
def test_a_dozen_noisy_steps_are_enough(num_steps):
    errors = [worst_error(learnt(MIX[:num_steps], noise(seed)).costs) for seed in range(40)]
    assert sorted(errors)[35] < 0.10
    assert max(errors) < 0.13


@pytest.mark.parametrize(("step", "pair"), [(100.0, 1.0), (1e-3, 1.0), (1.0, 1e-4), (0.03, 10.0)])
def test_exact_steps_are_learnt_exactly_even_if_the_prior_has_other_ratios(step, pair):
    model = EngineModel(replace(PRIOR, step_s=step * TRUE.step_s, pair_s=pair * TRUE.pair_s))
    run(model, MIX * 4)
    assert worst_error(model.costs) < 0.03


def test_a_fifth_of_the_steps_may_take_five_times_as_long():
    for seed in range(10):
        steps = random.Random(seed).choices(MIX, k=50)
        assert worst_error(learnt(steps, noise(seed, every_fifth=5.0)).costs) < 0.10


def test_ten_thousand_decode_steps_do_not_push_out_a_few_prefill_steps():
    model = learnt(PREFILLS)
    before_s = model.costs.prefill_s(0, 16384)
    run(model, [(cached, cached + 1 + cached % 32) for cached in range(10_000)], noise(1))
    assert model.num_observed == len(PREFILLS) + 10_000
    assert model.costs.prefill_s(0, 16384) == pytest.approx(before_s, rel=0.05)
    assert worst_error(model.costs) < 0.10


def test_memory_is_bounded():
    """Of steps and copies of all sizes, by what it takes to write the model down."""
    model, nbytes, random_ = EngineModel(PRIOR), [], random.Random(1)
    for _ in range(5):
        run(model, random_.choices(MIX, k=2000), noise(2, 0.9))
        for _ in range(2000):
            model.copy(random_.randint(1, 1 << 30), random_.uniform(1e-6, 1.0))
        nbytes.append(len(pickle.dumps(model)))
    assert model.num_observed == 10_000
    assert nbytes[-1] < min(1.2 * nbytes[0], 100_000)


@pytest.mark.parametrize("times", [0.25, 2.0, 10.0])
@pytest.mark.parametrize("steps", [[(0, 1024)], MIX], ids=["alike", "mixed"])
def test_an_engine_that_stays_faster_or_slower_is_believed_in_the_end(steps, times):
    model = learnt(steps * 20)
    run(model, steps * 40, repeat(times))
    now_s = times * TRUE.prefill_s(0, 1024)
    assert model.costs.prefill_s(0, 1024) == pytest.approx(now_s, rel=0.05)
    assert model.costs.uncertainty < 0.1


def test_a_well_known_engine_is_not_fitted_again_at_every_step():
    model = learnt(MIX * 20, noise(1))
    costs = model.costs
    run(model, MIX[:1], [2.0])
    assert model.costs == costs
    run(model, MIX)
    assert model.costs != costs


def test_copies_are_learnt_apart_from_steps():
    model = EngineModel(PRIOR)
    model.copy(1 << 20, TRUE.copy_s(1 << 20))
    assert model.costs.copy_bytes_per_s == pytest.approx(TRUE.copy_bytes_per_s)
    assert replace(model.costs, copy_bytes_per_s=PRIOR.copy_bytes_per_s) == PRIOR
    assert model.num_observed == 0


tokens, seconds = st.integers(1, 1 << 20), st.floats(1e-7, 1e4)


@given(st.lists(st.tuples(tokens, tokens, seconds), max_size=60))
def test_no_cost_is_negative_whatever_steps_took(steps):
    model = EngineModel(PRIOR)
    for tokens, cached, seconds in steps:
        model.step(tokens, num_pairs(cached, tokens), seconds)
        assert model.costs.prefill_s(0, 1000) > 0.0  # and a negative part is a ConfigError


# ------------------------------------------------------------------------------ how sure that is


def test_uncertainty_falls_as_steps_come():
    steps = MIX * 3
    sure = [learnt(steps[:num_steps]).costs.uncertainty for num_steps in (1, 4, 12, 40)]
    assert sure == sorted(sure, reverse=True)
    assert sure[0] > 0.2
    assert 0.02 <= sure[-1] < 0.06, "it is never quite sure"


def test_four_steps_in_five_are_within_the_uncertainty():
    assert 0.2 < learnt(MIX * 8, noise(2, 0.3)).costs.uncertainty < 0.3


# ---------------------------------------------------------------------------- what is not believed


@pytest.mark.parametrize("seconds", GARBAGE)
def test_steps_and_copies_that_took_no_time_at_all_or_for_ever_are_ignored(seconds):
    model, same = learnt(MIX), learnt(MIX)
    model.step(1000, 1e6, seconds)
    model.copy(1 << 20, seconds)
    assert (model.costs, model.num_observed) == (same.costs, same.num_observed)


@pytest.mark.parametrize(
    ("tokens", "pairs"), [(0, 0.0), (-5, 1e3), (99, math.nan), (99, math.inf), (99, -1.0)]
)
def test_steps_of_nothing_or_of_the_impossible_are_ignored(tokens, pairs):
    model = EngineModel(PRIOR)
    model.step(tokens, pairs, 0.01)
    run(model, MIX)
    assert (model.num_observed, model.costs) == (len(MIX), learnt(MIX).costs)


@pytest.mark.parametrize("nbytes", [0, -5])
def test_copies_and_reads_of_no_bytes_are_ignored(nbytes):
    engine, reads = EngineModel(PRIOR), ReadModel()
    engine.copy(nbytes, 0.01)
    engine.copy(1 << 20, TRUE.copy_s(1 << 20))
    reads.observe(nbytes, 0.01)
    assert engine.costs.copy_bytes_per_s == pytest.approx(TRUE.copy_bytes_per_s)
    assert (reads.num_observed, reads.costs()) == (0, ReadModel().costs())


@pytest.mark.parametrize("seconds", GARBAGE)
def test_reads_that_took_no_time_at_all_or_for_ever_are_ignored(reader, seconds):
    costs, num_observed = reader.costs(), reader.num_observed
    reader.observe(1 << 20, seconds)
    assert (reader.costs(), reader.num_observed) == (costs, num_observed)


# --------------------------------------------------------------------------------------- reads


def test_reads_teach_latency_and_bandwidth(reader):
    costs = reader.costs(ahead_nbytes=5, lag_nbytes=7)
    assert costs.fixed_s == pytest.approx(1e-3, rel=0.05)
    assert costs.bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert (costs.ahead_nbytes, costs.lag_nbytes) == (5, 7)
    assert reader.ratio(1 << 22, device_s(1 << 22, slower=4.0)) == pytest.approx(4.0, rel=0.02)
    assert reader.num_observed == 20, "asking is not learning"


def test_before_the_first_read_and_after_it_is_unsure_and_on_the_slow_side():
    model = ReadModel(fixed_s=1e-3, bytes_per_s=1e9)
    assert times_slower(model) >= 1.0
    assert model.costs().uncertainty == 0.5
    read(model, 1)
    assert 1.1 < times_slower(model) < 1.5
    assert model.costs().uncertainty > 0.2


def test_it_is_sure_while_reads_agree(reader):
    assert times_slower(reader) == pytest.approx(1.0, rel=0.02)
    assert reader.costs().uncertainty < 0.06
    read(reader, 1, slower=1.6)
    assert 0.2 < reader.costs().uncertainty <= 0.5


@pytest.mark.parametrize("slower", [1.5, 4.0, 20.0])
def test_a_slow_down_is_believed_after_one_read_and_its_end_after_three(reader, slower):
    read(reader, 1, slower=slower)
    assert times_slower(reader) == pytest.approx(slower, rel=0.15)
    assert times_slower(reader, 4096) == pytest.approx(slower, rel=0.15)
    read(reader, 2)
    assert times_slower(reader) > 0.9 * slower
    read(reader, 1)
    assert times_slower(reader) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("slower", [0.1, 0.5, 2.0, 10.0])
def test_a_device_that_stays_faster_or_slower_is_known_in_the_end(reader, slower):
    for _ in range(200):
        read(reader, 1, slower=slower)
        assert times_slower(reader) > 0.75 * slower, "it was underrated meanwhile"
    assert times_slower(reader) == pytest.approx(slower, rel=0.05)
    assert reader.costs().uncertainty < 0.1


def test_reset_forgets_everything(reader):
    read(reader, 1, slower=5.0)
    reader.reset()
    assert (reader.costs(), reader.num_observed) == (ReadModel().costs(), 0)


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(1e-7, 1e4)), max_size=60))
def test_a_read_always_takes_some_finite_time(reads):
    model = ReadModel()
    for nbytes, seconds in reads:
        model.observe(nbytes, seconds)
        costs = model.costs()
        assert 0.0 < costs.read_s(1 << 24) < math.inf
        assert 0.0 <= costs.uncertainty <= 0.5


def test_a_device_that_changed_its_speed_is_known_by_what_it_is_now():
    """Reads that broke the model once are ordinary when it has learnt them."""
    model, nbytes = ReadModel(), 6 << 20
    for _ in range(3):
        model.observe(nbytes, nbytes / 1e9)
    model.observe(nbytes, nbytes / 2e7)
    assert model.costs().bytes_per_s < 2.2e7, "believed at once"
    for _ in range(8):
        model.observe(nbytes, nbytes / 2e7)
    costs = model.costs()
    assert costs.read_s(nbytes) == pytest.approx(nbytes / 2e7, rel=0.2)
    for _ in range(12):
        model.observe(nbytes, nbytes / 1e9)
    assert model.costs().read_s(nbytes) < 2 * nbytes / 1e9
