"""Cold-rebuild time of runs whose answer is known."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.bench.rebuild import rebuild_times
from headstart.bench.run import Request


@dataclass
class Shape:
    """Requests a second apart, whose prompts grow as those of chats do."""

    count: int = 40

    def requests(self, hit, ttft_s):
        return [
            Request(
                session=f"{n}",
                prompt_tokens=100 * (n + 1),
                output_tokens=1,
                ttft_s=ttft_s(n),
                latency_s=ttft_s(n),
                intended_s=float(n),
                cached_tokens=int(hit(n) * 100 * (n + 1)),
            )
            for n in range(self.count)
        ]

    @property
    def steady(self):
        return self.requests(lambda n: 0.9, lambda n: 0.1 + n / 100)


LOAD = Shape()


def failed(request):
    return Request(
        session=request.session,
        prompt_tokens=request.prompt_tokens,
        output_tokens=0,
        intended_s=request.intended_s,
        sent_s=request.intended_s,
        error="503",
    )


def test_what_lost_nothing_is_as_good_with_the_first_full_window():
    found = rebuild_times(LOAD.steady, LOAD.steady)
    assert found.window == 10
    first = 9.0 + 0.19  # the tenth request's first token
    assert (found.hit_rate_s, found.ttft_s) == (pytest.approx(first), pytest.approx(first))


def test_a_cache_that_comes_back_is_timed_to_when_it_has():
    """From request 20 on all is as before: nine tokens of ten in a window, by tokens."""
    restarted = LOAD.requests(lambda n: 0.9 * (n >= 20), lambda n: 1.0 + n / 100 - 0.9 * (n >= 20))
    found = rebuild_times(restarted, LOAD.steady)
    # Window 20..29 is whole; 19..28 has 20 of 245 tokens missing, 18..27 already 39 of 235.
    assert found.hit_rate_s == pytest.approx(28.0 + 0.38)
    assert found.ttft_s is not None
    assert 25.0 < found.ttft_s < 27.0  # more than half of the window


def test_short_prompts_are_no_sign_of_a_warm_cache():
    """Without any hit, the first prompts are still faster than the median of all in steady."""
    restarted = LOAD.requests(lambda n: 0.0, lambda n: (0.1 + n / 100) * 1.2)
    assert restarted[0].ttft_s < LOAD.steady[20].ttft_s
    found = rebuild_times(restarted, LOAD.steady)
    assert (found.hit_rate_s, found.ttft_s) == (None, None)


def test_where_nothing_was_hit_nothing_comes_back():
    nothing = LOAD.requests(lambda n: 0.0, lambda n: 0.1)
    found = rebuild_times(nothing, nothing)
    assert (found.hit_rate_s, found.ttft_s) == (None, pytest.approx(9.1))


def test_hits_that_are_not_told_are_not_guessed():
    untold = [
        Request(session="0", prompt_tokens=9, output_tokens=1, ttft_s=0.1, intended_s=float(n))
        for n in range(8)
    ]
    found = rebuild_times(untold, untold)
    assert (found.window, found.hit_rate_s, found.ttft_s) == (2, None, pytest.approx(1.1))


def test_a_request_that_fails_is_slow_and_a_miss():
    steady = LOAD.steady
    restarted = [failed(r) if n < 12 else r for n, r in enumerate(steady)]
    found = rebuild_times(restarted, steady)
    # 11..20 has one of ten missing, 12 of 165 tokens; 10..19 has 23 of 155.
    assert found.hit_rate_s == pytest.approx(20.0 + 0.30)
    # 10..19 has the median 0.265 instead of 0.245, 9..18 the same instead of 0.235.
    assert found.ttft_s == pytest.approx(19.0 + 0.29)
    assert rebuild_times(steady, restarted).window == 7, "what failed before is not compared"
    everything = list(map(failed, steady))
    assert rebuild_times(everything, steady).ttft_s is None
    assert rebuild_times(steady, everything).ttft_s is None


def test_requests_count_in_the_order_of_their_first_tokens():
    steady = LOAD.steady
    slow = Request(**{**as_dict(steady[0]), "ttft_s": 1000.0, "latency_s": 1000.0})
    found = rebuild_times([slow, *steady[1:]], steady)
    assert found.ttft_s == pytest.approx(10.0 + 0.20), "the first ten are those of 1 to 10"


def as_dict(request):
    return {name: getattr(request, name) for name in request.__struct_fields__}


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 9)), min_size=1, max_size=80))
def test_a_time_is_that_of_a_request(points):
    load = Shape(count=len(points))
    restarted = load.requests(lambda n: points[n][0], lambda n: points[n][1])
    found = rebuild_times(restarted, load.steady)
    times = [r.intended_s + r.ttft_s for r in restarted]
    for seconds in (found.hit_rate_s, found.ttft_s):
        assert seconds is None or seconds in times
    assert 1 <= found.window <= 20
    assert not any(map(math.isnan, times))
