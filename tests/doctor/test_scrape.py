"""A live URL as input, against a real HTTP server."""

from __future__ import annotations

import http.server
import json
import socket
import threading

import pytest

from headstart.cli.main import main
from headstart.doctor.facts import Known
from headstart.doctor.readers import load
from headstart.doctor.readers.scrape import scrape
from headstart.errors import ConfigError


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.num_reads += 1
        status, body = 200, self.server.page(self.server.num_reads)
        if self.path != "/metrics":
            status, body = 404, "not here"
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        pass


def growing(number):
    return (
        f'vllm:time_to_first_token_seconds_sum{{engine="0"}} {100.0 * number}\n'
        f'vllm:time_to_first_token_seconds_count{{engine="0"}} {50 * number}\n'
        f'vllm:request_queue_time_seconds_sum{{engine="0"}} {90.0 * number}\n'
        f'vllm:request_queue_time_seconds_count{{engine="0"}} {50 * number}\n'
        f'vllm:num_requests_running{{engine="0"}} {number}\n'
    )


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.num_reads, server.page = 0, growing
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def address(server):
    return f"http://127.0.0.1:{server.server_port}"


def test_it_is_read_twice(server):
    slept = []
    url = address(server) + "/metrics"
    documents = scrape([url, url], 30.0, sleep=slept.append)
    assert (slept, server.num_reads) == ([30.0], 2)
    known = Known(load(documents).facts)
    assert known.top.numbers("num_requests", "ttft_mean", "running") == (50, 2.0, 2)
    assert str(known.top.fact("ttft_mean").source) == f"{url}:1"


def test_an_address_alone(server):
    (first, _) = scrape([address(server)], 1.0, sleep=lambda seconds: None)
    assert first.path.endswith("/metrics")


def test_the_command(server, capsys):
    with pytest.raises(SystemExit) as end:
        main(["doctor", address(server), "--window", "10ms", "--json", "-"])
    printed = capsys.readouterr()
    assert end.value.code == 1
    assert json.loads(printed.out)["findings"][0]["rule"] == "queue_dominates"
    assert server.num_reads == 2


@pytest.mark.parametrize("window", ["0s", "soon"])
def test_a_window_that_is_none(server, window, capsys):
    with pytest.raises(SystemExit) as end:
        main(["doctor", address(server), "--window", window])
    assert end.value.code == 2
    assert "30" in capsys.readouterr().err


def test_errors_say_what_to_do(server):
    def read(url):
        scrape([url], 1.0, sleep=lambda seconds: None)

    with pytest.raises(ConfigError, match=r"answers 404.*often at /metrics"):
        read(address(server) + "/health")
    server.page = lambda number: "<html>hello"
    with pytest.raises(ConfigError, match=r"no metrics of vLLM.*<html>hello"):
        read(address(server))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot be reached: Connection refused"):
            read(f"http://127.0.0.1:{port}/metrics")
    with pytest.raises(ConfigError, match="is no address"):
        read("http://127.0.0.1:none/metrics")


def test_a_server_that_goes_away(server):
    def stop(seconds):
        server.page = lambda number: ""

    with pytest.raises(ConfigError, match="no metrics"):
        scrape([address(server)], 1.0, sleep=stop)


def test_an_answer_without_end(server, monkeypatch):
    monkeypatch.setattr("headstart.doctor.scrape.MAX_NBYTES", 10)
    with pytest.raises(ConfigError, match="which are no metrics"):
        scrape([address(server)], 1.0, sleep=lambda seconds: None)
