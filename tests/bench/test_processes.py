"""Several client processes against a server of HTTP, from the first to the last of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from multiprocessing import active_children

import pytest

from headstart.bench.drive import Pace, Target
from headstart.bench.load import Ask
from headstart.bench.processes import send, split
from headstart.errors import ConfigError, HeadstartError
from stream_server import SOON, Server


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def asks_of(num_sessions, num_turns=1, **known):
    return [
        Ask(
            session=f"{number}",
            tokens=(1, 2, turn, number),
            num_shared=0,
            max_tokens=3,
            turn=turn,
            **known,
        )
        for turn in range(num_turns)
        for number in range(num_sessions)
    ]


def test_sessions_are_dealt_out_and_stay_together():
    asks = asks_of(5, 2)
    shares = split(asks, Pace(concurrency=5, processes=2))
    assert [share.pace for share in shares] == [Pace(concurrency=3), Pace(concurrency=2)]
    assert sorted(number for share in shares for number in share.numbers) == list(range(10))
    sessions = [{ask.session for ask in share.asks} for share in shares]
    assert sessions == [{"0", "2", "4"}, {"1", "3"}]
    for share in shares:
        assert share.asks == tuple(asks[number] for number in share.numbers)
        assert list(share.numbers) == sorted(share.numbers)


def test_an_open_loop_keeps_its_times():
    asks = asks_of(6)
    (whole,) = split(asks, Pace(rate=5.0, seed=1))
    parts = split(asks, Pace(rate=5.0, seed=1, processes=3))
    together = {session: at_s for share in parts for session, at_s in share.starts.items()}
    assert together == whole.starts


@pytest.mark.parametrize(
    ("pace", "message"),
    [
        (Pace(concurrency=2, processes=3), "3 processes cannot share 2 sessions at once"),
        (Pace(rate=1.0, processes=5), "5 processes cannot share 4 sessions; each needs one"),
        (Pace(rate=1.0, processes=0), "0 processes"),
    ],
)
def test_what_cannot_be_split_is_refused(pace, message):
    with pytest.raises(ConfigError, match=message):
        split(asks_of(4), pace)


def test_a_closed_loop_of_two_clients(server):
    server.delay_s = 0.02
    asks, done = asks_of(6, 2), []
    target = Target(url=server.url)
    requests, seconds = send(asks, target, Pace(concurrency=4, processes=2), done.append)
    assert [r.session for r in requests] == [ask.session for ask in asks]
    assert all(r.is_good for r in requests)
    assert server.num_running_max == 4
    assert sorted(body["prompt"][2:] for body in server.bodies) == sorted(
        [turn, number] for turn in range(2) for number in range(6)
    )
    assert (len(done), done[-1]) == (12, 12)
    assert all(r.intended_s + r.latency_s <= seconds < SOON for r in requests)
    for session in "012345":
        for earlier, later in pairwise(r for r in requests if r.session == session):
            assert later.sent_s >= earlier.intended_s + earlier.latency_s - 1e-6


def test_all_clients_start_at_one_time(server):
    asks = [
        Ask(session=f"{n}", tokens=(1, 2, 3, n), num_shared=0, max_tokens=3, at_s=0.05 * n)
        for n in range(4)
    ]
    requests, _ = send(asks, Target(url=server.url), Pace(is_timed=True, processes=2))
    assert [r.intended_s for r in requests] == pytest.approx([0.0, 0.05, 0.1, 0.15])
    assert [body["prompt"][3] for body in server.bodies] == [0, 1, 2, 3]
    assert all(0.0 <= r.sent_s - r.intended_s < SOON / 10 for r in requests)


def test_what_a_client_finds_wrong_is_raised_here():
    with pytest.raises(ConfigError, match=r"127.0.0.1:9 cannot be reached"):
        send(asks_of(2), Target(url="http://127.0.0.1:9"), Pace(rate=1.0, processes=2))


def test_a_client_that_dies_ends_the_run(server):
    server.delay_s = 0.2

    def kill(done):
        os.kill(active_children()[0].pid, signal.SIGKILL)

    with pytest.raises(HeadstartError, match=r"a client process ended by itself \(exit code -9\)"):
        send(asks_of(8), Target(url=server.url), Pace(concurrency=2, processes=2), kill)
    assert active_children() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_all_of_them(server, number):
    server.delay_s = 10 * SOON  # no client hears of it by what it sends
    words = [
        *(sys.executable, "-m", "headstart", "bench", "serve", "--url", server.url),
        *("--sessions", "4", "--concurrency", "4", "--processes", "2", "--warm-up", "0"),
    ]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        until = time.monotonic() + SOON
        while server.num_running < 4 and time.monotonic() < until:
            time.sleep(0.01)
        assert server.num_running == 4, "all clients send"
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        _, errors = process.communicate(timeout=SOON)
        assert process.returncode not in (0, None)
        assert "Traceback" not in errors
        while time.monotonic() < until:
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.01)
        pytest.fail("a client is still there")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
