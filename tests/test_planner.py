"""The planner: its bound whatever tiers do, its choice against brute force, its reasons."""

import time
from dataclasses import replace
from itertools import cycle

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headstart import planner
from headstart.costs import EngineCosts, ReadCosts
from headstart.planner import Held, Progress, Prompt, Reason, Wait, may_wait, plan

GAIN_S = 0.0005
"""What a plan has to save to be made."""
MARGIN = 1.1

ENGINE = EngineCosts(
    step_s=0.02,
    token_s=3.56e-3,
    pair_s=2.84e-6,
    uncertainty=0.0,
    max_step_tokens=8192,
    copy_bytes_per_s=4e9,
)
PROMPT = Prompt(num_tokens=4196, block_size=128, block_nbytes=5_898_240)
ALL = 32
"""Whole blocks of PROMPT."""
WAIT = Wait(ready=8, planned=16, waited_s=0.1, left_s=0.1, hedge_s=0.5)


def disk(megabytes_per_s):
    return ReadCosts(fixed_s=0.001, bytes_per_s=megabytes_per_s * 1e6)


def burst(num_blocks, share, **fields):
    """Gives all of its blocks at once, after a share of the time to recompute PROMPT."""
    nbytes = num_blocks * PROMPT.block_nbytes
    bytes_per_s = nbytes / (share * PROMPT.recompute_s(ENGINE))
    return ReadCosts(fixed_s=0.0, bytes_per_s=bytes_per_s, lag_nbytes=nbytes, **fields)


def memory(num_blocks):
    return Held(tier="memory", num_blocks=num_blocks, costs=None)


def file(num_blocks, costs, tier="file"):
    return Held(tier=tier, num_blocks=num_blocks, costs=costs)


# ------------------------------------------------------------------------------ what may be asked


floats = st.floats
either_way = st.sampled_from([-1.0, 1.0]) | floats(-1.0, 1.0)
uncertainties = st.sampled_from([0.0, 0.02, 0.14, 0.5]) | floats(0.0, 0.5)


@st.composite
def prompts(draw):
    size = draw(st.sampled_from([2, 16, 128]))
    num_tokens = draw(st.integers(2, 60 * size))
    return Prompt(
        num_tokens=num_tokens,
        block_size=size,
        block_nbytes=draw(st.sampled_from([4096, 2 << 20])),
        num_local=draw(st.just(0) | st.integers(0, num_tokens - 1)),
    )


@st.composite
def engines(draw, prompt, *, dearest_copy=1.0, uncertain=uncertainties):
    """To copy a block takes at most as long as to compute `dearest_copy` tokens."""
    token_s = draw(st.sampled_from([3e-5, 3.56e-3]) | floats(1e-6, 1e-2))
    return EngineCosts(
        step_s=draw(floats(0.0, 0.1)),
        token_s=token_s,
        pair_s=draw(st.just(0.0) | floats(0.0, token_s / 100)),
        uncertainty=draw(uncertain),
        max_step_tokens=draw(st.sampled_from([64, 512, 1 << 16])),
        copy_bytes_per_s=prompt.block_nbytes / (token_s * draw(floats(0.01, dearest_copy))),
    )


@st.composite
def reads(draw, prompt, engine, uncertain=uncertainties):
    """From much faster than the engine to slower."""
    fraction = draw(st.sampled_from([0.01, 0.1, 0.3, 0.6, 0.9, 2.0]) | floats(0.0, 3.0))
    block_s = prompt.recompute_s(engine) * prompt.block_size / prompt.num_tokens
    block_s = max(1e-9, fraction * block_s)
    return ReadCosts(
        fixed_s=draw(st.just(0.0) | floats(0.0, block_s)),
        bytes_per_s=prompt.block_nbytes / block_s,
        ahead_nbytes=draw(st.just(0) | st.integers(0, 3 * prompt.block_nbytes)),
        lag_nbytes=draw(st.integers(0, 4)) * prompt.block_nbytes,
        uncertainty=draw(uncertain),
    )


@st.composite
def helds(draw, prompt, engine, uncertain=uncertainties):
    """Up to three tiers; some add nothing to those before."""
    most = prompt.num_tokens // prompt.block_size
    blocks, costs = st.integers(0, most) | st.just(most), reads(prompt, engine, uncertain)
    first = st.none() | costs
    return [
        Held(tier=name, num_blocks=draw(blocks), costs=draw(costs if number else first))
        for number, name in enumerate("abc"[: draw(st.integers(0, 3))])
    ]


class Tiers:
    """Blocks become ready when they like: at drawn times, in bursts, or never.

    The spiteful ones hold some back until a request is about to leave, and then give a few.
    """

    def __init__(self, draw, recompute_s):
        times = floats(0.0, 2.0).map(lambda share: share * recompute_s)
        self.arrivals = draw(st.lists(st.tuples(times, st.integers(1, 60)), max_size=6))
        self.spite, self.num_spiteful = draw(st.integers(0, 3)), 0
        self.left_s = cycle(draw(st.just([0.0]) | st.lists(times, min_size=1, max_size=3)))

    def ready(self, now, planned):
        arrived = sum(count for at, count in self.arrivals if at <= now)
        return min(planned, arrived + self.num_spiteful)


def waits(prompt, engine, planned, tiers, pauses, *, has_steps=False):
    """How long a request waits that asks again after each pause, and what is ready then."""
    now = 0.0
    for pause_s in pauses:
        while True:
            ready = tiers.ready(now, planned.num_blocks)
            step_s, left_s = pause_s if has_steps else 0.0, next(tiers.left_s)
            wait = replace(WAIT, ready=ready, planned=planned.num_blocks, waited_s=now)
            wait = replace(wait, left_s=left_s, hedge_s=planned.hedge_s, step_s=step_s)
            if may_wait(prompt, engine, wait):
                break
            if not tiers.spite or ready == planned.num_blocks:
                return now, ready
            tiers.num_spiteful += tiers.spite
        now += pause_s
    raise AssertionError("it waits for ever")


def a_request(data, **options):
    prompt = data.draw(prompts())
    engine = data.draw(engines(prompt, **options))
    recompute_s = prompt.recompute_s(engine)
    busy_s = data.draw(st.just(0.0) | floats(0.0, recompute_s))
    planned = plan(prompt, data.draw(helds(prompt, engine)), engine, busy_s=busy_s)
    if data.draw(st.booleans()):  # the bound needs no good plan
        most, share = prompt.num_tokens // prompt.block_size, data.draw(floats(0.0, 0.5))
        planned = replace(planned, num_blocks=most, hedge_s=share * recompute_s)
    poll_s = recompute_s * data.draw(st.just(0.002) | floats(0.002, 0.1))
    return prompt, engine, planned, Tiers(data.draw, recompute_s), poll_s


# -------------------------------------------------------------------------------------- the bound


@given(st.data())
def test_whatever_tiers_do_the_first_token_is_late_by_no_more_than_the_hedge_and_a_poll(data):
    prompt, engine, planned, tiers, poll_s = a_request(data)
    waited_s, ready = waits(prompt, engine, planned, tiers, cycle([poll_s]))
    took_s = waited_s + prompt.prefill_s(engine, ready)
    assert took_s <= (planned.recompute_s + planned.hedge_s + poll_s) * (1 + 1e-9)
    assert planned.recompute_s == prompt.recompute_s(engine)


@given(st.data())
def test_steps_of_known_length_are_waited_for_within_the_bound(data):
    prompt, engine, planned, tiers, poll_s = a_request(data)
    steps = cycle([poll_s * data.draw(floats(0.5, 20.0)) for _ in range(3)])
    waited_s, ready = waits(prompt, engine, planned, tiers, steps, has_steps=True)
    took_s = waited_s + prompt.prefill_s(engine, ready)
    assert took_s <= (planned.recompute_s + planned.hedge_s) * (1 + 1e-9)


@given(st.data())
def test_costs_within_the_uncertainty_add_no_more_than_twice_its_share_of_the_copy(data):
    prompt, engine, planned, tiers, poll_s = a_request(data)
    waited_s, ready = waits(prompt, engine, planned, tiers, cycle([poll_s]))
    off = [1.0 + engine.uncertainty * data.draw(either_way) for _ in range(4)]
    truth = replace(
        engine,
        step_s=engine.step_s * off[0],
        token_s=engine.token_s * off[1],
        pair_s=engine.pair_s * off[2],
        copy_bytes_per_s=engine.copy_bytes_per_s / off[3],
    )
    took_s = waited_s + prompt.prefill_s(truth, ready)
    computed_s = engine.prefill_s(prompt.tokens(ready), prompt.num_tokens)
    copied_s = prompt.prefill_s(engine, ready) - computed_s
    bound_s = prompt.recompute_s(truth) + planned.hedge_s + poll_s
    assert took_s <= (bound_s + 2 * engine.uncertainty * copied_s) * (1 + 1e-9)


@given(st.data())
def test_times_each_off_by_the_uncertainty_add_no_more_than_twice_its_share_of_what_is_left(data):
    prompt, engine, planned, tiers, poll_s = a_request(data)
    waited_s, ready = waits(prompt, engine, planned, tiers, cycle([poll_s]))
    left_s = prompt.prefill_s(engine, ready)
    off = [engine.uncertainty * data.draw(either_way) for _ in range(2)]
    took_s = waited_s + left_s * (1.0 + off[0])
    bound_s = planned.recompute_s * (1.0 + off[1]) + planned.hedge_s + poll_s
    assert took_s <= (bound_s + 2 * engine.uncertainty * left_s) * (1 + 1e-9)


@given(st.data())
def test_where_copying_is_dear_the_bound_needs_that_only_what_helps_is_taken(data):
    prompt, engine, planned, tiers, poll_s = a_request(data, dearest_copy=500.0)
    waited_s, ready = waits(prompt, engine, planned, tiers, cycle([poll_s]))
    took_s = waited_s + min(prompt.prefill_s(engine, count) for count in range(ready + 1))
    assert took_s <= (planned.recompute_s + planned.hedge_s + poll_s) * (1 + 1e-9)


@given(st.data())
@pytest.mark.parametrize(
    ("uncertain", "share"), [(uncertainties, planner.MAX_SHARE), (st.just(0.5), planner.MIN_SHARE)]
)
def test_the_hedge_is_a_share_of_recomputing_and_small_for_guesses(uncertain, share, data):
    prompt = data.draw(prompts())
    engine = data.draw(engines(prompt))
    planned = plan(prompt, data.draw(helds(prompt, engine, uncertain)), engine)
    assert 0.0 <= planned.hedge_s <= share * planned.recompute_s * (1 + 1e-9)


# ------------------------------------------------------------------------------------- the choice


def brute_force(prompt, held, engine, busy_s):
    """Seconds by blocks for nothing and the end of each tier, and those that keep to the hedge."""
    recompute_s = prompt.recompute_s(engine)
    times, allowed, load_s, needed_s, start = {0: recompute_s}, {0}, 0.0, 0.0, 0
    for part in held:
        if part.num_blocks <= start:
            continue
        if costs := part.costs:
            lag = max(1, costs.lag_nbytes // prompt.block_nbytes)
            for ready in range(start, part.num_blocks):
                until = min(part.num_blocks, ready + lag)
                came_s = load_s - busy_s + costs.read_s((until - start) * prompt.block_nbytes)
                late_s = came_s - max(0.0, recompute_s - prompt.prefill_s(engine, ready))
                needed_s = max(needed_s, MARGIN * late_s)
            load_s += costs.read_s((part.num_blocks - start) * prompt.block_nbytes)
        start = part.num_blocks
        times[start] = max(0.0, load_s - busy_s) + prompt.prefill_s(engine, start)
        if needed_s <= planner.MAX_SHARE * recompute_s:
            allowed.add(start)
    return times, allowed


@given(st.data())
def test_the_choice_is_the_best_end_of_a_tier_that_keeps_to_the_hedge(data):
    prompt = data.draw(prompts())
    assume(prompt.num_tokens < 32 * prompt.block_size)  # more blocks are checked by samples
    engine = data.draw(engines(prompt, dearest_copy=20.0, uncertain=st.just(0.0)))
    held = data.draw(helds(prompt, engine, st.just(0.0)))
    busy_s = data.draw(st.just(0.0) | floats(0.0, prompt.recompute_s(engine)))
    planned = plan(prompt, held, engine, busy_s=busy_s)
    times, allowed = brute_force(prompt, held, engine, busy_s)
    assert planned.num_blocks in allowed
    planned_s = max(0.0, planned.load_s - busy_s) + planned.prefill_s
    assert planned_s == pytest.approx(times[planned.num_blocks])
    best_s = min(times[end] for end in allowed)
    assert planned_s <= best_s + GAIN_S + 1e-9


@given(st.data())
def test_no_number_of_blocks_is_better_than_an_end_of_a_tier_by_more_than_a_token(data):
    prompt = data.draw(prompts())
    engine = data.draw(engines(prompt, dearest_copy=20.0))
    engine = replace(engine, max_step_tokens=prompt.num_tokens)  # one step, whatever is loaded
    costs = replace(data.draw(reads(prompt, engine)), fixed_s=0.0)
    held = prompt.num_tokens // prompt.block_size

    def took_s(count):
        return costs.read_s(count * prompt.block_nbytes) + prompt.prefill_s(engine, count)

    best_s = min(took_s(count) for count in range(held + 1))
    # The last token is always computed: the last block may save one token less than the others.
    token_s = engine.work_s(1, prompt.num_tokens)
    tolerance_s = token_s if held * prompt.block_size == prompt.num_tokens else 1e-9
    assert min(took_s(0), took_s(held)) <= best_s + tolerance_s + 1e-9


# ------------------------------------------------------------------------------------ the reasons

REASONS = [
    (Reason.MISS, []),
    (Reason.MISS, [memory(0), file(0, disk(1000))]),
    (Reason.LOAD, [memory(ALL)]),
    (Reason.LOAD, [file(ALL, disk(1000))]),
    (Reason.LOAD, [memory(8), file(ALL, disk(1000))]),
    (Reason.PART, [memory(8), file(ALL, disk(1))]),
    (Reason.PART, [memory(0), file(8, disk(1000)), file(9, disk(1), "c")]),
    (Reason.SLOW, [file(ALL, disk(1))]),
    (Reason.RISKY, [file(ALL, burst(ALL, 0.47))]),
    (Reason.RISKY, [file(ALL, burst(ALL, 0.12, uncertainty=0.5))]),
]


@pytest.mark.parametrize(("reason", "held"), REASONS)
def test_a_plan_says_why_so_much_is_loaded(reason, held):
    planned = plan(PROMPT, held, ENGINE)
    num_held = max((part.num_blocks for part in held), default=0)
    expected = {Reason.LOAD: num_held, Reason.PART: 8}.get(reason, 0)
    assert (planned.reason, planned.num_blocks) == (reason, expected)
    assert {reason for reason, _ in REASONS} == set(Reason) - {Reason.BREAKER}


@pytest.mark.parametrize(
    "held",
    [[file(ALL, burst(ALL, 0.36))], [file(16, burst(16, 0.36)), file(ALL, disk(1000), "c")]],
)
def test_the_hedge_covers_the_longest_wait_for_the_next_blocks_with_a_margin(held):
    planned = plan(PROMPT, held, ENGINE)
    assert planned.reason is Reason.LOAD
    assert planned.hedge_s / planned.recompute_s == pytest.approx(MARGIN * 0.36 + planner.SLACK)


def test_what_is_in_memory_is_waited_for_by_no_more_than_the_slack():
    planned = plan(PROMPT, [memory(8), file(ALL, disk(1))], ENGINE)
    assert planned.load_s == 0.0
    assert planned.hedge_s == planner.SLACK * planned.recompute_s
    assert planned.prefill_s == PROMPT.prefill_s(ENGINE, 8)


def test_what_is_read_while_the_engine_computes_for_others_is_free():
    held = [file(ALL, disk(2))]
    load_s = held[0].costs.read_s(ALL * PROMPT.block_nbytes)
    assert plan(PROMPT, held, ENGINE).reason is Reason.SLOW
    planned = plan(PROMPT, held, ENGINE, busy_s=load_s)
    assert planned.reason is Reason.LOAD
    assert planned.hedge_s == planner.SLACK * planned.recompute_s


def test_little_beyond_the_engines_own_prefix_is_not_worth_loading():
    held, own = [file(8, disk(40))], replace(PROMPT, num_local=8 * PROMPT.block_size - 1)
    copy_s = ENGINE.copy_s(PROMPT.block_nbytes)
    assert own.prefill_s(ENGINE, 8) == copy_s + ENGINE.prefill_s(1024, own.num_tokens)
    assert plan(PROMPT, held, ENGINE).reason is Reason.LOAD
    assert plan(own, held, ENGINE).reason is Reason.SLOW
    assert plan(replace(PROMPT, num_local=2000), [memory(8)], ENGINE).num_blocks == 0


def test_a_prompt_that_is_held_to_its_end_computes_its_last_token():
    prompt = replace(PROMPT, num_tokens=ALL * PROMPT.block_size)
    planned = plan(prompt, [memory(ALL)], ENGINE)
    last_s = ENGINE.prefill_s(prompt.num_tokens - 1, prompt.num_tokens)
    assert planned.prefill_s == last_s + ENGINE.copy_s(ALL * prompt.block_nbytes)


# ------------------------------------------------------------------------------------ the waiting

GAINED_S = PROMPT.prefill_s(ENGINE, 8) - PROMPT.prefill_s(ENGINE, 16)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"ready": 16}, False),
        ({"left_s": 0.99 * GAINED_S}, True),
        ({"left_s": 1.01 * GAINED_S}, False),
        ({"step_s": 0.99 * GAINED_S, "hedge_s": 9.0}, True),
        ({"step_s": 1.01 * GAINED_S, "hedge_s": 9.0}, False),
        ({"ready": 0, "waited_s": 0.4}, True),
        ({"ready": 0, "waited_s": 0.4, "step_s": 0.2}, False),
        ({"ready": 0, "waited_s": 0.6}, False),
        ({"ready": 8, "waited_s": 0.6}, True),
    ],
)
def test_a_request_waits_while_it_gains_and_has_patience_for_the_step_that_runs(changed, expected):
    assert may_wait(PROMPT, ENGINE, replace(WAIT, **changed)) is expected


def progress(**changed):
    """Ten blocks, two in memory from the start, the others planned to take 0.1 s each."""
    known = {"planned": 10, "at_start": 2, "ready": 2, "load_s": 0.8, "elapsed_s": 0.0}
    return Progress(**{**known, "moved_s": 0.0, **changed})


@pytest.mark.parametrize(
    ("changed", "left_s"),
    [
        ({}, 0.8),
        ({"elapsed_s": 0.3}, 0.5),
        ({"elapsed_s": 1.0}, 0.2),  # overdue: as long again
        ({"elapsed_s": 3.0}, 2.2),
        ({"ready": 6, "elapsed_s": 0.4, "moved_s": 0.4}, 0.4),
        ({"ready": 6, "elapsed_s": 0.5, "moved_s": 0.4}, 0.3),
        ({"ready": 6, "elapsed_s": 1.2, "moved_s": 1.2}, 0.8),  # half planned, half measured
        ({"ready": 10, "elapsed_s": 5.0, "moved_s": 5.0}, 0.0),
        ({"planned": 2, "load_s": 0.0}, 0.0),
    ],
)
def test_what_is_left_is_as_planned_at_first_and_as_measured_in_the_end(changed, left_s):
    assert progress(**changed).left_s == pytest.approx(left_s)


def test_a_tier_of_which_little_is_known_does_not_get_the_share_of_a_surer_one():
    sure = file(16, burst(16, 0.05), tier="sure")
    for uncertainty, reason in ((0.0, Reason.LOAD), (0.5, Reason.PART)):
        behind = file(ALL, burst(ALL - 16, 0.5, uncertainty=uncertainty), tier="behind")
        made = plan(PROMPT, [sure, behind], ENGINE)
        assert (made.reason, made.num_blocks) == (reason, ALL if reason is Reason.LOAD else 16)


@pytest.mark.parametrize(
    ("load_s", "best_s", "expected"),
    [(1.0, 2.0, 0.0), (1.0, 1.2, 0.3), (5.0, None, 0.5), (5.0, 9.0, 0.5), (0.0, 0.6, 0.0)],
)
def test_regret_is_what_the_best_in_hindsight_would_have_saved(load_s, best_s, expected):
    times = {"actual_load_s": load_s, "actual_prefill_s": 0.5, "recompute_s": 5.0}
    assert planner.regret_s(best_load_s=best_s, **times) == pytest.approx(expected)


def test_a_plan_of_thousands_of_blocks_is_quick():
    prompt = replace(PROMPT, num_tokens=4096 * 16 + 5, block_size=16)
    held = [memory(1000), file(4096, disk(3000))]
    started = time.perf_counter()
    for _ in range(300):
        planned = plan(prompt, held, ENGINE)
    mean_s = (time.perf_counter() - started) / 300
    print(f"a plan of 4,096 blocks takes {mean_s * 1e6:.0f} us")
    assert planned.num_blocks == 4096
    assert mean_s < 0.005
