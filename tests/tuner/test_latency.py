"""Times of first tokens: small cases by hand, and what holds for all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.bench.slo import parse_slo
from headstart.costs import EngineCosts, ReadCosts
from headstart.errors import ConfigError
from headstart.tuner.latency import (
    Asked,
    Level,
    Loads,
    Loop,
    Medium,
    Serving,
    replay,
    summarise,
)

COSTS = EngineCosts(
    step_s=0.01,
    token_s=1e-3,
    pair_s=0.0,
    uncertainty=0.0,
    max_step_tokens=8192,
    copy_bytes_per_s=4e9,
)
SIZE, NBYTES = 4, 1_000_000
MEMORY = Medium(name="memory")
DISK = Medium(name="file", reads=ReadCosts(fixed_s=0.005, bytes_per_s=1e9))
SERVING = Serving(
    costs=COSTS, block_size=SIZE, block_nbytes=NBYTES, media=(MEMORY, DISK), loads=Loads.ALWAYS
)
PLANNED = replace(SERVING, loads=Loads.PLANNED)


def asked(*requests):
    """Of (time, tokens, blocks in memory, blocks in memory and on the disk)."""
    at_s, num_tokens, memory, file = map(np.array, zip(*requests, strict=True))
    return Asked(
        at_s=at_s.astype(float),
        num_tokens=num_tokens,
        own_blocks=np.zeros(len(requests), np.int64),
        held=(memory, file),
    )


def ttft(serving, *requests):
    return replay(asked(*requests), serving).ttft_s.tolist()


def disk(bytes_per_s, fixed_s=0.005):
    reads = ReadCosts(fixed_s=fixed_s, bytes_per_s=bytes_per_s)
    return replace(PLANNED, media=(MEMORY, Medium(name="file", reads=reads)))


# ------------------------------------------------------------------------------------ one request


def test_alone_and_with_no_hit_it_takes_its_prefill():
    assert ttft(PLANNED, (3.0, 100, 0, 0)) == [pytest.approx(0.01 + 0.1)]
    assert ttft(PLANNED, (3.0, 100, 0, 0)) == [pytest.approx(COSTS.prefill_s(0, 100))]


def test_a_hit_in_memory_is_copied_and_the_rest_computed():
    found = ttft(PLANNED, (0.0, 100, 20, 20))
    assert found == [pytest.approx(20 * 0.25e-3 + 0.01 + 0.02)]


def test_a_hit_on_the_disk_is_read_first():
    found = ttft(PLANNED, (0.0, 100, 0, 20))
    assert found == [pytest.approx((0.005 + 0.02) + 20 * 0.25e-3 + 0.01 + 0.02)]


def test_what_memory_has_is_not_read():
    found = ttft(PLANNED, (0.0, 100, 15, 20))
    assert found == [pytest.approx((0.005 + 0.005) + 20 * 0.25e-3 + 0.01 + 0.02)]


def test_the_last_token_of_a_prompt_is_always_computed():
    answered = replay(asked((0.0, 80, 20, 20)), PLANNED)
    assert answered.ttft_s.tolist() == [pytest.approx(20 * 0.25e-3 + 0.01 + 0.001)]
    assert answered.sources["computed"].tolist() == [1]
    assert answered.sources["memory"].tolist() == [79]


def test_what_comes_later_than_computed_is_not_loaded():
    slow = disk(1e8)
    assert ttft(slow, (0.0, 100, 0, 20)) == [pytest.approx(0.11)]
    late = ttft(replace(slow, loads=Loads.ALWAYS), (0.0, 100, 0, 20))
    assert late == [pytest.approx(0.205 + 0.005 + 0.03)]


def test_a_part_is_loaded_where_only_that_is_sooner():
    answered = replay(asked((0.0, 100, 15, 20)), disk(1e7))
    assert answered.sources["memory"].tolist() == [60]
    assert answered.sources["file"].tolist() == [0]
    assert answered.ttft_s.tolist() == [pytest.approx(15 * 0.25e-3 + 0.01 + 0.04)]


def test_what_the_engine_has_itself_is_neither_read_nor_copied():
    one = asked((0.0, 100, 15, 20))
    one = replace(one, own_blocks=np.array([15]))
    answered = replay(one, PLANNED)
    assert answered.ttft_s.tolist() == [pytest.approx((0.005 + 0.005) + 5 * 0.25e-3 + 0.01 + 0.02)]
    assert {name: each.tolist() for name, each in answered.sources.items()} == {
        "engine": [60],
        "memory": [0],
        "file": [20],
        "computed": [20],
    }
    assert answered.recompute_s.tolist() == [pytest.approx(0.01 + 0.04)]
    alone = replay(replace(one, held=()), replace(PLANNED, media=()))
    assert alone.ttft_s.tolist() == [pytest.approx(0.01 + 0.04)]


# ------------------------------------------------------------------------------ several of them


def test_two_at_once_queue_for_one_engine():
    two = [(1.0, 100, 0, 0), (1.0, 100, 0, 0)]
    assert ttft(PLANNED, *two) == [pytest.approx(0.11), pytest.approx(0.22)]
    assert ttft(replace(PLANNED, num_engines=2), *two) == [pytest.approx(0.11)] * 2


def test_one_that_comes_later_waits_for_what_is_left():
    assert ttft(PLANNED, (1.0, 100, 0, 0), (1.08, 50, 0, 0))[1] == pytest.approx(0.03 + 0.06)
    assert ttft(PLANNED, (1.0, 100, 0, 0), (1.11, 50, 0, 0))[1] == pytest.approx(0.06)


def test_reads_queue_for_one_device():
    two = [(0.0, 100, 0, 20), (0.0, 100, 0, 20), (10.0, 100, 0, 20)]
    rest = 20 * 0.25e-3 + 0.03
    found = ttft(replace(SERVING, num_engines=2), *two)
    alone = 0.025 + rest
    assert found == [pytest.approx(alone), pytest.approx(alone + 0.02), pytest.approx(alone)]


def test_the_planner_knows_of_the_queue_of_the_device():
    two = [(0.0, 100, 0, 20), (0.0, 100, 0, 20)]
    serving = replace(disk(4e8), num_engines=2)
    # The second would be read after 0.1 s, and has 0.11 s to compute.
    assert ttft(serving, *two)[1] == pytest.approx(0.11)
    assert ttft(serving, *two)[0] == pytest.approx(0.055 + 0.035)


def test_one_that_is_read_does_not_hold_up_who_is_ready():
    slow = replace(disk(1e8), loads=Loads.ALWAYS)
    found = ttft(slow, (0.0, 100, 0, 20), (0.1, 50, 0, 0))
    assert found == [pytest.approx(0.24), pytest.approx(0.06)]


def test_reading_is_free_while_the_engine_computes_for_others():
    alone = replay(asked((0.0, 100, 0, 20)), disk(1e8))
    assert alone.sources["file"].tolist() == [0]
    behind = replay(asked((0.0, 1000, 0, 0), (0.0, 100, 0, 20)), disk(1e8))
    assert behind.sources["file"].tolist() == [0, 80]
    assert behind.ttft_s[1] == pytest.approx(1.01 + 0.035)


def test_a_request_goes_where_the_least_is_to_compute():
    three = [(0.0, 1000, 0, 0), (0.0, 100, 0, 0), (0.05, 100, 0, 0)]
    found = ttft(replace(PLANNED, num_engines=2), *three)
    assert found == [pytest.approx(1.01), pytest.approx(0.11), pytest.approx(0.06 + 0.11)]


# ------------------------------------------------------------------------------- a closed loop


def in_a_loop(concurrency, answer_s, *requests, serving=PLANNED):
    loop = Loop(concurrency=concurrency, answer_s=np.array(answer_s))
    return replay(replace(asked(*requests), loop=loop), serving)


def test_one_at_a_time_comes_with_the_last_token_of_the_one_before():
    rows = [(7.0, 100, 0, 0), (7.0, 100, 20, 20), (7.0, 50, 0, 0)]
    found = in_a_loop(1, [1.0, 0.0, 0.5], *rows)
    assert found.ttft_s.tolist() == [pytest.approx(each) for each in (0.11, 0.035, 0.06)]
    assert found.at_s.tolist() == [0.0, pytest.approx(1.11), pytest.approx(1.145)]
    assert replay(asked(*rows), PLANNED).at_s.tolist() == [7.0, 7.0, 7.0], "open"


def test_of_two_places_the_first_that_is_free_is_taken():
    found = in_a_loop(2, [0.5, 0.0, 0.0, 0.0], *[(0.0, 100, 0, 0)] * 4)
    # One computes while the other waits; the first one's answer is long.
    assert found.at_s.tolist() == [pytest.approx(each) for each in (0.0, 0.0, 0.22, 0.33)]
    assert found.ttft_s.tolist() == [pytest.approx(each) for each in (0.11, 0.22, 0.11, 0.11)]


def test_a_loop_has_places():
    with pytest.raises(ConfigError, match="0 requests at once; at least 1 is"):
        in_a_loop(0, [0.0], (0.0, 100, 0, 0))


# ------------------------------------------------------------------------------ of all of them

counts = st.integers(1, 200)
requests = st.lists(
    st.tuples(st.integers(0, 3000), counts, st.integers(0, 50), st.integers(0, 50)),
    min_size=1,
    max_size=12,
)
rates = st.floats(1e5, 1e11)


def spread(rows):
    """So far apart that each is alone."""
    return [(1e4 * number, *row[1:]) for number, row in enumerate(rows)]


def within(rows):
    """Prompts hold at most what they have."""
    return [
        (at, tokens, min(memory, tokens // SIZE), min(max(memory, file), tokens // SIZE))
        for at, tokens, memory, file in rows
    ]


@given(requests, rates, st.floats(1.0, 100.0), st.floats(0.0, 0.1))
def test_alone_more_bandwidth_never_makes_it_later(rows, bytes_per_s, factor, fixed_s):
    rows = within(spread(rows))
    slow = ttft(disk(bytes_per_s, fixed_s), *rows)
    fast = ttft(disk(bytes_per_s * factor, fixed_s), *rows)
    assert np.median(fast) <= np.median(slow) * (1 + 1e-9)
    assert all(b <= a * (1 + 1e-9) for a, b in zip(slow, fast, strict=True))


@given(requests, rates, st.floats(0.0, 0.1))
def test_alone_the_planner_is_never_later_than_loading_nothing(rows, bytes_per_s, fixed_s):
    rows = within(spread(rows))
    serving = disk(bytes_per_s, fixed_s)
    planned = ttft(serving, *rows)
    never = ttft(serving, *[(*row[:2], 0, 0) for row in rows])
    assert all(a <= b * (1 + 1e-9) for a, b in zip(planned, never, strict=True))


@given(requests, rates, st.integers(1, 3), st.sampled_from(Loads))
def test_work_is_done_once_and_in_time(rows, bytes_per_s, num_engines, loads):
    rows = within(sorted((at / 1000, *row) for at, *row in rows))
    serving = replace(disk(bytes_per_s), num_engines=num_engines, loads=loads)
    one, answered = asked(*rows), replay(asked(*rows), serving)
    again = replay(asked(*rows), serving)
    assert answered.ttft_s.tolist() == again.ttft_s.tolist(), "the same every time"
    assert (answered.ttft_s >= answered.compute_s * (1 - 1e-9)).all()
    tokens = sum(answered.sources.values())
    assert tokens.tolist() == [row[1] for row in rows]
    assert all((each >= 0).all() for each in answered.sources.values())
    assert (answered.sources["computed"] >= 1).all()
    ended = one.at_s + answered.ttft_s
    assert ended.max() >= one.at_s[0] + answered.compute_s.sum() / num_engines - 1e-6
    if num_engines == 1:  # computing for one does not overlap with computing for another
        order = np.argsort(ended)
        begun = (ended - answered.compute_s)[order]
        assert (begun[1:] >= ended[order][:-1] - 1e-6).all()


@given(requests, st.integers(1, 4), st.integers(1, 3), st.lists(st.floats(0, 2), min_size=12))
def test_a_loop_is_full_and_never_overfull(rows, concurrency, num_engines, answers):
    rows = within(rows)
    answer_s = np.array(answers[: len(rows)])
    serving = replace(SERVING, num_engines=num_engines)
    found = in_a_loop(concurrency, answer_s, *rows, serving=serving)
    ends = found.at_s + found.ttft_s + answer_s
    assert (np.diff(found.at_s) >= 0.0).all(), "in their order"
    for number, at_s in enumerate(found.at_s):
        num_open = int((ends[:number] > at_s + 1e-9).sum())
        assert num_open < concurrency
        assert at_s == 0.0 or np.isclose(ends[:number], at_s).any(), "as soon as one may"


def test_with_queues_more_bandwidth_may_make_one_later():
    """Why only requests that are alone are promised anything: a long prompt is ready first."""
    rows = [(0.0, 1000, 0, 100), (0.3, 20, 0, 0)]
    serving = replace(disk(2e8), loads=Loads.ALWAYS)
    fast = replace(disk(4e8), loads=Loads.ALWAYS)
    assert ttft(fast, *rows)[1] > ttft(serving, *rows)[1]


# ------------------------------------------------------------------------------ summed up


def test_sums():
    rows = [(0.0, 9, 0, 0), (10.0, 100, 0, 0), (10.0, 100, 20, 20), (20.0, 100, 0, 20)]
    one, answered = asked(*rows), replay(asked(*rows), PLANNED)
    level = Level(slo=parse_slo("ttft=120ms,latency=1s"), tpot_s=0.1)
    outputs = [1, 1, 1, 100]
    found = summarise(one, answered, PLANNED, first=1, output_tokens=outputs, level=level)
    # The hit in memory queues behind the one before it.
    times = [0.11, 0.11 + 0.035, 0.06]
    assert answered.ttft_s[1:].tolist() == [pytest.approx(each) for each in times]
    assert (found.p50_s, found.p99_s) == (pytest.approx(0.11), pytest.approx(0.145))
    assert found.mean_s == pytest.approx(sum(times) / 3)
    assert found.window_s == pytest.approx(10.06)
    assert found.slo_share == pytest.approx(1 / 3), "one queued, one's answer is long"
    assert found.goodput_per_s == pytest.approx(1 / 10.06)
    assert found.compute_s == pytest.approx(0.11 + 0.035 + 0.035)
    assert found.saved_s == pytest.approx(2 * (0.11 - 0.035))
    assert found.saved_share == pytest.approx(0.15 / 0.33)
    assert (found.most_per_s, found.bound_by) == (pytest.approx(3 / 0.18), "engines")
    assert found.offered == pytest.approx(0.018)
    shares = {"engine": 0.0, "memory": 80 / 300, "file": 80 / 300, "computed": 140 / 300}
    assert found.shares == {name: pytest.approx(share) for name, share in shares.items()}


def test_the_device_may_be_what_binds():
    rows = [(0.0, 100, 0, 20), (5.0, 100, 0, 20)]
    serving = replace(disk(4e8), num_engines=4)
    found = summarise(asked(*rows), replay(asked(*rows), serving), serving)
    assert (found.bound_by, found.most_per_s) == ("file", pytest.approx(2 / 0.1))
    assert found.slo_share is found.goodput_per_s is None


def test_an_answer_at_just_the_time_a_token_meets_the_level():
    one = asked((0.0, 100, 0, 0))
    level = Level(slo=parse_slo("tpot=30ms"), tpot_s=0.03)
    for num in range(2, 40):
        found = summarise(one, replay(one, PLANNED), PLANNED, output_tokens=[num], level=level)
        assert found.slo_share == 1.0


def test_what_cannot_be_served_is_refused():
    with pytest.raises(ConfigError, match="a bandwidth is above 0"):
        disk(0.0)
    with pytest.raises(ConfigError, match="each must be at least 1"):
        replace(PLANNED, num_engines=0)
    with pytest.raises(ConfigError, match="without times"):
        asked((float("nan"), 1, 0, 0))
