"""The driver against a server of HTTP that streams well, badly, or not at all."""

from __future__ import annotations

import asyncio
import resource
from itertools import pairwise

import pytest

from headstart.bench.drive import Pace, Target, drive, starts_of
from headstart.bench.load import Ask
from headstart.errors import ConfigError
from stream_server import GOOD, SOON, USAGE, Server, chunk


def ask(number=0, session=None, **known):
    session = f"{number}" if session is None else session
    return Ask(session=session, tokens=(1, 2, 3, number), num_shared=0, max_tokens=3, **known)


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def driven(server, asks, **pace):
    pace = pace or {"concurrency": 1}
    return asyncio.run(drive(asks, Target(url=server.url), Pace(**pace)))


def test_an_answer_is_timed_to_its_first_token_that_is_not_empty(server):
    server.delay_s = 0.05
    (request,), seconds = driven(server, [ask()])
    assert request.error is None
    assert 0.1 <= request.ttft_s < request.latency_s <= seconds < SOON
    assert request.latency_s - request.ttft_s >= 0.08
    assert (request.prompt_tokens, request.output_tokens, request.cached_tokens) == (4, 3, 2)
    (body,) = server.bodies
    assert (body["prompt"], body["max_tokens"], body["model"]) == ([1, 2, 3, 0], 3, "model")
    assert (body["stream"], body["temperature"], body["ignore_eos"]) == (True, 0, True)
    assert body["return_token_ids"] is True


def test_the_times_between_tokens_are_kept(server):
    server.delay_s = 0.03
    (request,), _ = driven(server, [ask()])
    assert len(request.itl_s) == 2, "of three tokens"
    assert all(0.02 <= gap_s < SOON for gap_s in request.itl_s)
    assert sum(request.itl_s) == pytest.approx(request.latency_s - request.ttft_s, abs=1e-4)
    server.events = [chunk("abc"), USAGE, "[DONE]"]
    assert driven(server, [ask()])[0][0].itl_s == (), "one piece"
    server.status = 429
    assert driven(server, [ask()])[0][0].itl_s is None


def test_token_ids_count_where_there_is_no_text(server):
    server.events = [{"choices": [{"text": "", "token_ids": [5]}]}, USAGE, "[DONE]"]
    server.models["data"][0]["owned_by"] = "somebody"
    (request,), _ = driven(server, [ask()])
    assert request.is_good
    assert "return_token_ids" not in server.bodies[0]


def test_a_digest_does_not_depend_on_how_an_answer_is_cut(server):
    outputs = set()
    for events in (
        [
            {"choices": [{"text": "", "token_ids": [5]}]},
            {"choices": [{"text": "é", "token_ids": [6]}]},
        ],
        [{"choices": [{"text": "é", "token_ids": [5, 6]}]}],
    ):
        server.events = [*events, USAGE, "[DONE]"]
        outputs.add(driven(server, [ask()])[0][0].output)
    assert len(outputs) == 1


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), 0.0])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ConfigError, match="a rate of"):
        Pace(rate=rate)


def test_equal_answers_have_equal_digests(server):
    (one, two), _ = driven(server, [ask(), ask(1)])
    server.events = [chunk("x"), *GOOD]
    (other,), _ = driven(server, [ask()])
    assert one.output == two.output != other.output


BAD = {
    "429": ({"status": 429}, "HTTP 429: Too Many Requests"),
    "no stream": ({"kind": "application/json"}, "does not stream"),
    "no usage": ({"events": [chunk("a"), "[DONE]"]}, "does not tell its usage"),
    "cut": ({"events": [chunk("a"), "cut"]}, ""),
    "no end": ({"events": [chunk("a"), USAGE]}, "the answer was cut short"),
    "no token": ({"events": [chunk(""), USAGE, "[DONE]"]}, "no token came"),
    "no json": ({"events": ['{"choices"']}, "an event is no JSON"),
    "no object": ({"events": ["[1]"]}, "an event is no object"),
    "error": ({"events": [{"error": "out of memory"}]}, "the server says: out of memory"),
    "other prompt": (
        {"events": [chunk("a"), {"usage": {"prompt_tokens": 9}}, "[DONE]"]},
        "4 tokens were asked, not 9",
    ),
    "null choice": ({"events": ['{"choices": [null]}']}, "not what such a server sends"),
    "no choices": ({"events": ['{"choices": 5}']}, "not what such a server sends"),
    "odd usage": ({"events": [chunk("a"), {"usage": [1]}, "[DONE]"]}, "not what such a server"),
    "no length": (
        {"events": [chunk("a"), {"usage": {"prompt_tokens": 4}}, "[DONE]"]},
        "usage makes no sense",
    ),
    "endless line": ({"events": ["x" * (1 << 20)]}, "an event is no JSON"),
    "deep": ({"events": ["[" * 50_000]}, "an event is no JSON"),
    **{
        f"usage of {told}": (
            {"events": [chunk("a"), {"usage": {"prompt_tokens": 4, **told}}, "[DONE]"]},
            "usage makes no sense",
        )
        for told in (
            *({"completion_tokens": count} for count in (True, -1, 4, 1.5)),
            *(
                {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": count}}
                for count in (-1, 5, "2")
            ),
        )
    },
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_answer_is_an_error_of_its_request(server, name):
    changes, message = BAD[name]
    for field, value in changes.items():
        setattr(server, field, value)
    (request,), _ = driven(server, [ask()])
    assert not request.is_good
    assert request.error
    assert message in request.error
    assert request.ttft_s is None


def test_a_server_that_is_not_there_or_is_another_is_refused(server):
    with pytest.raises(ConfigError, match="cannot be reached"):
        asyncio.run(drive([ask()], Target(url="http://127.0.0.1:9"), Pace(concurrency=1)))
    with pytest.raises(ConfigError, match="has no model 'other'; it has: model"):
        asyncio.run(drive([], Target(url=server.url, model="other"), Pace(concurrency=1)))
    several = {"data": [{"id": name} for name in "ab"]}
    for models, message in (
        (503, f"^{server.url}/v1/models answers 503: busy"),
        ({"data": 5}, "is no list of models"),
        ({"data": []}, "has no models"),
        (several, "has several models, name one: a, b"),
    ):
        server.models = models
        with pytest.raises(ConfigError, match=message):
            driven(server, [ask()])
    with pytest.raises(ConfigError, match="name one"):
        driven(server, [ask()], rate=1.0, concurrency=2)


def test_turns_of_a_session_follow_each_other_and_sessions_do_not_wait(server):
    server.delay_s = 0.01
    asks = [ask(n, session=f"{n % 3}", turn=n // 3) for n in range(9)]
    requests, _ = driven(server, asks, concurrency=3)
    assert server.num_running_max == 3
    assert [r.session for r in requests] == [a.session for a in asks]
    for session in "012":
        mine = [r for r in requests if r.session == session]
        for earlier, later in pairwise(mine):
            assert later.intended_s >= earlier.intended_s + earlier.latency_s - 1e-6


def test_an_open_loop_does_not_wait_for_the_server(server):
    server.delay_s = 0.1
    requests, _ = driven(server, [ask(n) for n in range(10)], rate=50.0)
    assert server.num_running_max > 3
    assert all(r.sent_s >= r.intended_s for r in requests)
    again, _ = driven(server, [ask(n) for n in range(10)], rate=50.0)
    assert [r.intended_s for r in again] == [r.intended_s for r in requests], "a seed"


def test_a_trace_is_sent_at_its_times_whatever_the_server_does(server):
    server.delay_s = 0.1
    asks = [ask(n, at_s=at_s) for n, at_s in enumerate((0.0, 0.05, 0.05, 0.3))]
    requests, _ = driven(server, asks, is_timed=True)
    assert [r.intended_s for r in requests] == [0.0, 0.05, 0.05, 0.3]
    assert server.num_running_max == 4
    assert all(0.0 <= r.sent_s - r.intended_s < SOON / 10 for r in requests)


def test_a_turn_that_is_late_counts_from_its_time(server):
    server.delay_s = 0.1
    asks = [ask(n, session="one", turn=n, at_s=0.05 * n, think_s=9.0) for n in range(2)]
    _, later = driven(server, asks, is_timed=True)[0]
    assert later.intended_s == 0.05
    assert later.sent_s >= 0.4, "it follows the turn before"
    assert later.ttft_s >= later.sent_s - later.intended_s


def test_a_load_without_times_is_not_sent_at_them():
    with pytest.raises(ConfigError, match="this load has no times of its own"):
        starts_of([ask()], Pace(is_timed=True))
    with pytest.raises(ConfigError, match="name one"):
        Pace(rate=1.0, is_timed=True)
    assert starts_of([ask(), ask(1)], Pace(concurrency=1)) == {}


def test_a_run_tells_how_it_was_sent_and_no_more():
    assert Pace(concurrency=4).told() == {"rate": None, "concurrency": 4}
    assert Pace(rate=2.0, seed=3).told() == {"rate": 2.0, "concurrency": None}
    told = Pace(is_timed=True, processes=2).told()
    assert told == {"rate": None, "concurrency": None, "trace_time": 1.0, "processes": 2}


def test_a_prompt_that_comes_back_with_its_answer_may_be_long(server):
    server.events = [chunk("a", prompt_token_ids=[29_999] * 200_000), USAGE, "[DONE]"]
    assert driven(server, [ask()])[0][0].error is None


def test_what_follows_the_end_of_an_answer_is_not_waited_for(server):
    server.events = [chunk("a"), USAGE, "[DONE]", chunk("late"), "no json"]
    (request,), _ = driven(server, [ask()])
    assert (request.error, request.latency_s) == (None, request.ttft_s)
    server.events = [chunk("a"), USAGE, "[DONE]", "wait"]
    (request,), seconds = driven(server, [ask()])
    assert request.error is None
    assert seconds < SOON


def test_a_server_that_hangs_before_it_lists_its_models_is_given_up(server):
    server.models = "wait"
    with pytest.raises(ConfigError, match=r"does not list its models within 0\.1 s"):
        asyncio.run(drive([ask()], Target(url=server.url, timeout_s=0.1), Pace(concurrency=1)))


def test_more_at_once_than_there_are_sessions_is_no_more_work(server):
    requests, _ = driven(server, [ask(0), ask(1)], concurrency=10**12)
    assert [request.error for request in requests] == [None, None]


def test_connections_may_be_more_than_a_shell_allows_at_first(server):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        driven(server, [ask()])
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
