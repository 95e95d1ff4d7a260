"""What an engine learns of its own speed: which step took how long, and what is left out of it."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from headstart.costs import EngineCosts, num_pairs
from headstart.node.protocol import Costs

pytest.importorskip("vllm")

# The warnings of vLLM's own imports are not ours to mend.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

PRIOR = EngineCosts(
    step_s=1e-3,
    token_s=1e-4,
    pair_s=1e-8,
    uncertainty=0.5,
    max_step_tokens=2048,
    copy_bytes_per_s=4e9,
)
SAVED = Costs(2e-3, 5e-4, 3e-8, 0.04, 512, 1e9)


class Model:
    """Notes what is learnt."""

    def __init__(self):
        self.steps, self.copies, self.costs = [], [], PRIOR

    @property
    def num_observed(self):
        return len(self.steps)

    def step(self, tokens, pairs, seconds):
        self.steps.append((tokens, pairs, pytest.approx(seconds)))

    def copy(self, nbytes, seconds):
        self.copies.append((nbytes, seconds))


@pytest.fixture
def module():
    from headstart.engines.vllm import pace

    return pace


@pytest.fixture
def pace(module):
    """One that notes instead of learning."""
    made = module.Pace(PRIOR)
    made._model = Model()
    return made


@pytest.fixture
def told():
    """Makes what workers tell of a step."""
    from headstart.engines.vllm.step import WorkerMeta

    return lambda number, **fields: WorkerMeta(number=number, **fields)


# --------------------------------------------------------------------------------- whose step it is


def test_a_step_takes_from_its_start_to_its_output(pace, told):
    number = pace.begin({"a": (16, 4), "b": (0, 10)}, 5.0)
    pace.end(told(number), 5.5)
    assert pace._model.steps == [(14, 16 * 4 + 8 + 50, 0.5)]
    assert pace.busy_s == pytest.approx(0.5)


def test_time_between_steps_is_nobodys(pace, told):
    for start in (0.0, 7.0, 100.0):
        pace.end(told(pace.begin({"a": (0, 8)}, start)), start + 0.25)
    assert [seconds for _, _, seconds in pace._model.steps] == [0.25] * 3
    assert pace.busy_s == pytest.approx(0.75)


def test_a_step_that_overlaps_starts_when_the_one_before_is_over(pace, told):
    first = pace.begin({"a": (0, 100)}, 0.0)
    second = pace.begin({"a": (100, 50)}, 0.1)
    pace.end(told(first), 1.0)
    third = pace.begin({"a": (150, 50)}, 1.01)
    pace.end(told(second), 1.5)
    pace.end(told(third), 2.25)
    assert [(tokens, seconds) for tokens, _, seconds in pace._model.steps] == [
        (100, 1.0),
        (50, 0.5),
        (50, 0.75),
    ]
    assert pace.busy_s == pytest.approx(2.25)


def test_outputs_are_matched_by_number_and_not_by_order(pace, told):
    numbers = [pace.begin({"a": (0, tokens)}, 0.0) for tokens in (10, 20, 30)]
    pace.end(told(numbers[2]), 1.0)
    pace.end(told(numbers[0]), 2.0)
    assert [tokens for tokens, _, _ in pace._model.steps] == [30, 10]


def test_an_output_that_is_lost_leaves_the_next_ones_right(pace, told):
    pace.begin({"a": (0, 1000)}, 0.0)
    number = pace.begin({"a": (0, 20)}, 3.0)
    pace.end(told(number), 3.5)
    assert pace._model.steps == [(20, 200, 0.5)]


def test_lost_outputs_take_no_memory(pace, told):
    for now in range(1000):
        number = pace.begin({"a": (0, 20)}, float(now))
    assert len(pace._steps) <= 64
    pace.end(told(number), 999.5)
    assert pace._model.steps == [(20, 200, 0.5)]


def test_an_output_counts_once_and_a_strange_one_never(pace, told):
    number = pace.begin({"a": (0, 20)}, 0.0)
    for strange in (0, -1, number + 1, number, number):
        pace.end(told(strange), 1.0)
    assert pace._model.steps == [(20, 200, 1.0)]
    assert pace.busy_s == pytest.approx(1.0)


# --------------------------------------------------------------------------------- what is left out


def test_copies_are_taken_out_of_a_step(pace, told):
    number = pace.begin({"a": (0, 20)}, 0.0)
    pace.end(told(number, load_copy_s=0.25, store_copy_s=0.125, loaded_nbytes=4096), 1.0)
    assert pace._model.steps == [(20, 200, 0.625)]
    assert pace._model.copies == [(4096, 0.25)]
    assert pace.busy_s == pytest.approx(1.0)  # whoever waits for it waits for the copies as well


def test_a_step_that_only_copied_teaches_nothing_but_that(module, told):
    pace = module.Pace(PRIOR)
    number = pace.begin({"a": (0, 20)}, 0.0)
    pace.end(told(number, load_copy_s=1.0, loaded_nbytes=1 << 20), 1.0)
    assert pace.num_steps == 0
    assert (pace.costs.step_s, pace.costs.token_s) == (PRIOR.step_s, PRIOR.token_s)
    assert pace.costs.copy_bytes_per_s < PRIOR.copy_bytes_per_s / 2


def test_copies_in_a_step_that_computes_nothing_are_learnt_too(pace, told):
    """Loads between steps are mostly there."""
    pace.end(told(pace.begin({}, 0.0), load_copy_s=0.5, loaded_nbytes=1 << 20), 1.0)
    assert pace._model.steps == []
    assert pace._model.copies == [(1 << 20, 0.5)]


def test_a_step_of_which_not_all_is_known_is_not_learnt(pace, told):
    pace.end(told(pace.begin({}, 0.0)), 1.0)
    assert pace._model.steps == []


def test_the_step_behind_one_that_is_not_learnt_starts_with_its_end(pace, told):
    unknown = pace.begin({}, 0.0)
    known = pace.begin({"a": (0, 20)}, 0.1)
    pace.end(told(unknown), 1.0)
    pace.end(told(known), 1.5)
    assert pace._model.steps == [(20, 200, 0.5)]


# ------------------------------------------------------------------------------------ what is known


def test_costs_are_found_in_steps_of_all_kinds(module, told):
    pace, chance, now = module.Pace(PRIOR), random.Random(5), 0.0
    true = EngineCosts(
        step_s=0.02,
        token_s=1e-3,
        pair_s=2e-7,
        uncertainty=0.0,
        max_step_tokens=2048,
        copy_bytes_per_s=1e9,
    )
    for _ in range(120):
        cached, new = chance.choice([(0, 2048), (2048, 2048), (900, 1), (0, 300), (64, 40)])
        number = pace.begin({"a": (cached, new)}, now)
        now += true.step_s + true.work_s(new, num_pairs(cached, new)) + 0.01
        pace.end(told(number, load_copy_s=0.01, loaded_nbytes=10**7), now)
    for prompt in (100, 1000, 4000):
        assert pace.costs.prefill_s(0, prompt) == pytest.approx(true.prefill_s(0, prompt), rel=0.1)
    assert pace.step_s(1000) == pytest.approx(true.prefill_s(0, 1000), rel=0.1)
    assert pace.costs.copy_bytes_per_s == pytest.approx(1e9, rel=0.1)
    assert pace.costs.uncertainty < 0.1


def test_it_begins_with_what_an_earlier_engine_has_learnt(module):
    pace = module.Pace(PRIOR)
    pace.begin_with(None)
    assert pace.costs == PRIOR
    pace.begin_with(SAVED)
    costs = pace.costs
    assert (costs.step_s, costs.token_s, costs.pair_s) == (SAVED.step_s, SAVED.token_s, 3e-8)
    assert costs.copy_bytes_per_s == SAVED.copy_bytes_per_s
    assert costs.max_step_tokens == PRIOR.max_step_tokens  # this engine's own setting
    assert SAVED.uncertainty < costs.uncertainty <= PRIOR.uncertainty


def test_what_was_seen_counts_more_than_what_was_saved(module, told):
    pace = module.Pace(PRIOR)
    pace.end(told(pace.begin({"a": (0, 1000)}, 0.0)), 4.0)
    seen = pace.costs
    pace.begin_with(SAVED)
    assert pace.costs == seen
    assert seen.prefill_s(0, 1000) == pytest.approx(4.0, rel=0.1)


def config(**fields):
    """Of an engine."""
    model = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4} | fields
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**model)),
        parallel_config=SimpleNamespace(world_size=2),
        device_config=SimpleNamespace(device_type=fields.get("device", "cuda")),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=4096),
    )


def test_a_prior_counts_what_a_forward_pass_does(module):
    plain = module.prior_costs(config())
    wide = module.prior_costs(config(intermediate_size=256, head_dim=32))
    parameters = 2 * (4 * 64 * 64 + 3 * 64 * 256)
    assert plain.token_s == pytest.approx(2 * parameters / 2e15)
    assert wide.token_s == pytest.approx(2 * (parameters + 2 * 4 * 64 * 64) / 2e15)
    assert wide.pair_s == pytest.approx(2 * plain.pair_s)
    assert plain.max_step_tokens == 4096
    assert module.prior_costs(config(device="cpu")).token_s > 100 * plain.token_s
