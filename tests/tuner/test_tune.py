"""The knee, the advice and the page."""

from __future__ import annotations

import numpy as np
import pytest

from headstart.errors import ConfigError
from headstart.traces.reading import Broken
from headstart.tuner.curve import Curve, Rates, depths, lru_curve
from headstart.tuner.report import tune_html
from headstart.tuner.simulate import rates, simulate
from headstart.tuner.tune import Point, document, knee_blocks, pareto, tune
from tuner_cases import SIZE, chats, recorded


def curve(*hits):
    return Curve(blocks=np.array(hits), tokens=np.array(hits), num_blocks=1000, num_tokens=1000)


def test_the_knee_is_where_doubling_stops_to_pay():
    assert knee_blocks(curve(0, 100, 200, 300, 300, 300)) == 3
    assert knee_blocks(curve(0, 100, 200, 300, 305, 309)) == 3
    assert knee_blocks(curve(0, 100, 100, 100, 100, 100, 100, 100, 150)) == 8, "a late step counts"
    assert knee_blocks(curve(0, 100, 100, 100, 100, 100, 100, 100, 150), 0.06) == 1
    assert knee_blocks(curve(0, 1, 2, 3, 4)) is None
    assert knee_blocks(curve(0, 100, 115)) == 1
    assert knee_blocks(curve(0, 100, 115), 0.01) == 2
    assert knee_blocks(curve(0, 100)) == 1
    assert knee_blocks(curve(0)) is None


def test_points_are_those_of_curve_and_simulation(tmp_path):
    trace = recorded(tmp_path, chats(1))
    told = []
    tuned = tune(
        trace,
        policies=["lru", "fifo", "optimal"],
        capacities_tokens=[12 * SIZE, 30 * SIZE + 1],
        advance=lambda *step: told.append(step),
    )
    assert [(each.policy, each.capacity_tokens) for each in tuned.points] == [
        (name, capacity) for name in ("lru", "fifo", "optimal") for capacity in (48, 121)
    ]
    found = lru_curve(trace, depths(trace))
    assert tuned.points[1].cold == found.at(30)
    assert tuned.points[2].cold == rates(trace, simulate(trace, "fifo", 12))
    assert tuned.points[2].late == rates(trace, simulate(trace, "fifo", 12), len(trace) // 2)
    steps = [done for _, done, _ in told]
    assert steps == sorted(steps)
    assert steps[0] == 0 < steps[-1] < told[0][2]
    found = document(tuned)
    assert found["schema"] == "headstart.tune/1"
    assert found["trace"]["requests"] == len(trace)
    assert found["curve"][0]["token_hit"] == tuned.points[0].cold.token_hit
    assert {each["policy"] for each in found["pareto"]} <= {"lru", "fifo"}
    advice = found["recommended"]
    assert advice["policy"] in ("lru", "fifo")
    assert advice["capacity_tokens"] == SIZE * knee_blocks(tuned.late)
    assert "twice as many" in advice["reasons"][0]
    assert any(each.startswith("policies there: lru") for each in advice["reasons"])


def test_capacities_end_where_all_is_hit(tmp_path):
    trace = recorded(tmp_path, chats(2))
    tuned = tune(trace)
    last = tuned.points[-1]
    assert last.capacity_tokens == SIZE * tuned.cold.enough_blocks
    assert last.cold == tuned.cold.infinite
    assert last.cold.token_hit == tuned.infinite.tokens_cold > tuned.points[0].cold.token_hit
    assert tuned.advice.capacity_tokens in [point.capacity_tokens for point in tuned.points]


def test_block_sizes_are_compared_at_one_capacity(tmp_path):
    tuned = tune(recorded(tmp_path, chats(3)))
    assert [each.block_size for each in tuned.sizes] == [4, 8, 16, 32]
    knee = tuned.advice.capacity_tokens
    assert tuned.sizes[0].late == tuned.late.at(knee // 4)
    shares = {each.block_size: each.late.token_hit for each in tuned.sizes}
    assert shares[tuned.advice.block_size] >= shares[4] - 0.01
    assert all(
        share < shares[4] - 0.01 for size, share in shares.items() if size > tuned.advice.block_size
    )


def test_a_load_without_reuse_is_told_to_have_no_cache(tmp_path):
    rows = [
        {"timestamp": n, "input_length": 8, "output_length": 1, "hash_ids": [2 * n, 2 * n + 1]}
        for n in range(20)
    ]
    tuned = tune(recorded(tmp_path, rows), policies=["lru", "fifo"])
    assert tuned.advice.capacity_tokens is None
    assert tuned.advice.reasons == ("all that can be hit are 0.0% of the tokens",)
    assert document(tuned)["recommended"]["capacity_tokens"] is None


def test_pareto_has_no_point_that_a_smaller_one_beats():
    def point(policy, capacity, hit):
        both = Rates(block_hit=hit, token_hit=hit)
        return Point(policy=policy, capacity_tokens=capacity, cold=both, late=both)

    good = [point("fifo", 10, 0.2), point("lru", 20, 0.5), point("fifo", 40, 0.6)]
    bad = [point("lru", 10, 0.1), point("fifo", 20, 0.4), point("lru", 40, 0.6)]
    assert pareto([*bad[:2], *good, point("optimal", 10, 0.9)]) == good
    assert len(pareto([*bad, *good])) == 3


def test_what_cannot_be_tuned_is_refused(tmp_path):
    trace = recorded(tmp_path, chats(0))
    with pytest.raises(ConfigError, match="policy 'mru' is unknown; known: lru, fifo"):
        tune(trace, policies=["lru", "mru"])
    for options in ({"policies": []}, {"capacities_tokens": [0]}):
        with pytest.raises(ConfigError, match="at least"):
            tune(trace, **options)


def test_the_page_shows_curves_knee_and_what_was_not_read(tmp_path):
    pytest.importorskip("matplotlib")
    tuned = tune(recorded(tmp_path, chats(4)), policies=["lru", "fifo", "optimal"])
    broken = Broken()
    broken.add("x, line 3: <no JSON>")
    page = tune_html(tuned, "a&b", broken)
    assert page.count("<svg ") >= 1
    for text in ("a&amp;b", "the knee", "optimal (only simulated)", "&lt;no JSON&gt;"):
        assert text in page
    assert f"{tuned.advice.capacity_tokens:,}" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page
