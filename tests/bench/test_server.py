"""Servers that are started, emptied and ended, and those that do not come up."""

import os
import sys
import time

import pytest

import prefix_server
from headstart.bench.counters import family
from headstart.bench.server import OwnServer, reset_prefix_cache
from headstart.config import server_environment
from headstart.errors import ConfigError, HeadstartError
from node_process import wait_for
from stream_server import Server


@pytest.fixture
def make(tmp_path):
    made = []

    def server(*words, start_s=20.0):
        program = (sys.executable, prefix_server.__file__)
        made.append(
            OwnServer(
                "mine",
                lambda port: [*map(str, program), "--port", str(port), *words],
                environ=server_environment(),
                log=tmp_path / "server.log",
                start_s=start_s,
            )
        )
        return made[-1]

    yield server
    for each in made:
        each.stop()


def test_a_server_is_started_asked_and_ended(make):
    server = make()
    server.start()
    server.check()
    first = server.url
    assert server.forget()
    assert server.metrics() == "# nothing\n"
    pid = server.pid
    server.stop()
    assert family([pid]) == []
    server.stop()
    assert server.metrics() is None
    server.start()
    assert (server.pid != pid, server.url.startswith("http://127.0.0.1:")) == (True, True)
    assert first.startswith("http://127.0.0.1:")


def test_its_last_words_are_told_when_it_does_not_come_up(make, tmp_path):
    with pytest.raises(HeadstartError) as refused:
        make("--crash").start()
    for part in ("arm mine ended with exit code 1", "no GPU, says the server", "server.log"):
        assert part in str(refused.value)


def test_what_never_answers_is_not_waited_for_forever(make):
    server = make("--hang", start_s=3.0)
    started = time.monotonic()
    with pytest.raises(HeadstartError, match="does not answer at /v1/models within 3 s"):
        server.start()
    assert time.monotonic() - started < 10.0
    pid = server.pid
    server.stop()
    assert family([pid]) == []


def test_a_command_that_is_none_is_refused(tmp_path):
    log = tmp_path / "server.log"
    server = OwnServer("mine", lambda port: ["./no such program"], environ={}, log=log)
    with pytest.raises(ConfigError, match=r"'./no such program' cannot be started: No such"):
        server.start()
    server.stop()


def test_what_it_started_ends_with_it(make, tmp_path):
    """A child that does not hear of the end of its parent."""
    code = (
        "import os, signal, sys\n"
        "if os.fork() == 0:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    signal.pause()\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    )
    server = OwnServer(
        "mine",
        lambda port: [sys.executable, "-c", code, prefix_server.__file__, "--port", str(port)],
        environ=server_environment(),
        log=tmp_path / "server.log",
    )
    try:
        server.start()
        pids = family([server.pid])
        assert len(pids) == 2
    finally:
        server.stop()
    wait_for(lambda: not family(pids), "the end of both")


def test_a_cache_is_empty_only_when_the_server_says_so(make):
    server = make("--no-reset")
    server.start()
    assert not server.forget()
    server.stop()
    with pytest.raises(HeadstartError, match="cannot be reached"):
        reset_prefix_cache(server.url)
    others = Server()
    try:
        assert not reset_prefix_cache(others.url)
    finally:
        others.close()


def test_the_environment_lets_vllm_empty_its_cache():
    found = server_environment({"HOME": "/root", "HTTP_PROXY": "x"})
    assert found == {"HOME": "/root", "HTTP_PROXY": "x", "VLLM_SERVER_DEV_MODE": "1"}
    assert server_environment({"VLLM_SERVER_DEV_MODE": "0"})["VLLM_SERVER_DEV_MODE"] == "0"
    assert server_environment().keys() >= os.environ.keys()


def test_a_proxy_is_for_other_servers(make, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    server = make()
    server.start()
    assert server.forget()
