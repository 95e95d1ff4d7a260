"""What a sample tells: depths and capacities as for the whole trace, and errors that hold."""

from __future__ import annotations

import numpy as np
import pytest

from headstart.errors import ConfigError
from headstart.tuner.curve import (
    NEVER,
    blocks_in_sample,
    depth_steps,
    depths,
    lru_curve,
    step_of,
)
from headstart.tuner.sampled import (
    LEAST_SESSIONS,
    error_rows,
    errors,
    sample_document,
)
from headstart.tuner.simulate import rates, simulate
from headstart.tuner.tune import tune
from tuner_cases import SIZE, many_chats, prompts, recorded


def depths_by_hand(trace):
    """Depths in blocks of the whole trace, from a stack that is looked through."""
    users = {}
    for blocks, session in zip(prompts(trace), trace.session.tolist(), strict=True):
        for block in blocks:
            users.setdefault(block, set()).add(session)
    stack, found = [], []
    for blocks, session in zip(prompts(trace), trace.session.tolist(), strict=True):
        for block in blocks:
            if block not in stack:
                found.append(None)
                continue
            above = stack[: stack.index(block) + 1]
            others = [one for one in above if users[one].isdisjoint({session})]
            single = [one for one in others if len(users[one]) == 1]
            is_common = len(users[block]) > 1
            rest = len(above) - len(single)
            found.append(len(above) if is_common else rest + len(single) / trace.share)
        stack = [*blocks, *(block for block in stack if block not in blocks)]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_others_blocks_count_for_more_and_own_and_common_ones_for_one(tmp_path, seed):
    some = recorded(tmp_path, many_chats(seed, 60), share=0.5, seed=seed)
    step = step_of(some)
    expected = [
        NEVER if depth is None else int(np.ceil(depth / step - 1e-9))
        for depth in depths_by_hand(some)
    ]
    assert depth_steps(some).tolist() == expected
    assert 0.2 < some.share < 0.8


def test_a_small_sample_has_coarse_steps(tmp_path):
    rows = many_chats(0, 300)
    whole, some = recorded(tmp_path, rows), recorded(tmp_path, rows, share=0.1)
    assert (step_of(whole), step_of(some)) == (1, int(1 / some.share))
    curve = lru_curve(some, depth_steps(some))
    assert curve.step > 5
    assert curve.at(curve.enough_blocks) == curve.infinite
    assert curve.at(curve.enough_blocks - 1) != curve.infinite
    assert len(curve.blocks) < len(some.parent), "no longer than the sample"
    enough = lru_curve(whole, depths(whole)).enough_blocks
    assert curve.enough_blocks == pytest.approx(enough, rel=0.5), "of the whole trace"


def test_depths_in_blocks_are_only_of_a_whole_trace(tmp_path):
    some = recorded(tmp_path, many_chats(0, 60), share=0.5)
    with pytest.raises(ConfigError, match=r"needs the whole trace, .* leave out --sample"):
        depths(some)
    whole = recorded(tmp_path, many_chats(0, 60))
    assert depth_steps(whole).tolist() == depths(whole).tolist()


def test_a_simulated_capacity_is_where_lru_hits_as_much(tmp_path):
    some = recorded(tmp_path, many_chats(1, 200), share=0.3)
    curve = lru_curve(some, depth_steps(some))
    for capacity in (60, 150, 400):
        hits = rates(some, simulate(some, "lru", capacity))
        assert hits.block_hit == pytest.approx(curve.at(capacity).block_hit, abs=0.01)
    assert blocks_in_sample(some, 0) == 0
    assert blocks_in_sample(recorded(tmp_path, many_chats(1, 20)), 77) == 77


def test_parts_are_disjoint_and_all(tmp_path):
    some = recorded(tmp_path, many_chats(2, 200), share=0.5)
    parts = some.parts(8, seed=1)
    sessions = [set(part.session.tolist()) for part in parts]
    assert set.union(*sessions) == set(some.session.tolist())
    assert sum(map(len, sessions)) == len(set(some.session.tolist()))
    assert max(map(len, sessions)) - min(map(len, sessions)) <= 1
    assert sum(part.share for part in parts) == pytest.approx(some.share)


CAPACITIES = [60 * SIZE, 150 * SIZE, 300 * SIZE]


def test_what_the_whole_trace_tells_is_within_the_error(tmp_path):
    """In 19 of 20 cases, and never far outside."""
    off = []
    for seed in range(3):
        rows = many_chats(seed, 400, pause=12.0)
        whole, some = recorded(tmp_path, rows), recorded(tmp_path, rows, share=0.25, seed=seed)
        both = [
            tune(each, policies=["lru", "fifo"], capacities_tokens=CAPACITIES)
            for each in (whole, some)
        ]
        found = errors(both[1], seed)
        assert found.num_sessions == len(set(some.session.tolist()))
        for true, told, error in zip(both[0].points, both[1].points, found.points, strict=True):
            assert (true.policy, true.capacity_tokens) == (told.policy, told.capacity_tokens)
            off.append(abs(told.cold.token_hit - true.cold.token_hit) / error.cold)
            off.append(abs(told.late.token_hit - true.late.token_hit) / error.late)
            assert max(error.cold, error.late) < 0.15, "an error that says something"
        most = [each.late.infinite.token_hit for each in both]
        off.append(abs(most[1] - most[0]) / found.infinite.late)
        knees = [each.advice.capacity_tokens for each in both]
        assert knees[1] == pytest.approx(knees[0], rel=0.5)
    assert np.mean(np.array(off) <= 1.0) > 0.9
    assert max(off) < 2.0
    assert min(off) < 0.5 < max(off), "neither all right by chance, nor wide enough for anything"


def test_the_larger_the_sample_the_smaller_the_error(tmp_path):
    rows = many_chats(3, 400)
    widths = []
    for share in (0.1, 0.4, 0.9):
        tuned = tune(recorded(tmp_path, rows, share=share), capacities_tokens=CAPACITIES)
        widths.append(np.mean([each.cold for each in errors(tuned, 0).points]))
    assert widths == sorted(widths, reverse=True)


def test_a_sample_too_small_for_an_error_is_refused(tmp_path):
    few = recorded(tmp_path, many_chats(0, LEAST_SESSIONS - 10))
    with pytest.raises(ConfigError, match=r"19 sessions cannot tell how far off .* with 40 sess"):
        errors(tune(few), 0)


def test_errors_are_shown_and_written(tmp_path):
    some = recorded(tmp_path, many_chats(0, 200), share=0.5)
    told = []
    tuned = tune(some, capacities_tokens=CAPACITIES[:1])
    found = errors(tuned, 0, lambda *step: told.append(step))
    assert [done for _, done, _ in told] == list(range(8))
    document = sample_document(tuned, found)
    assert document["share"] == some.share
    assert document["curve"] == [
        {
            "token_hit_error": found.points[0].cold,
            "token_hit_last_half_error": found.points[0].late,
        }
    ]
    titles, (row, last) = error_rows(tuned, found)
    assert len(titles) == len(row) == len(last) == 4
    assert row[2] == f"{tuned.points[0].cold.token_hit:.2%} ± {100 * found.points[0].cold:.2f}"
    assert last[:2] == ["any", "no limit"]
