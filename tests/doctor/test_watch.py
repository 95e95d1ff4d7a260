"""`headstart doctor --watch`: scrapes of a real HTTP server, and what is shown of them."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headstart.cli.doctor_watch import spark, watch
from headstart.cli.main import main
from headstart.doctor.facts import Fact, Source
from headstart.doctor.readers import Document
from headstart.doctor.scrape import fetch
from headstart.doctor.watch import WINDOW, Watch
from headstart.errors import ConfigError

WAIT_S = 30


def metrics(requests, *, queue_s=0.01, ttft_s=1.0, hits=0.5, preempted=0, running=3):
    """Counters after so many requests, of which each was like that."""
    return f"""# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_count{{engine="0"}} {requests}
vllm:time_to_first_token_seconds_sum{{engine="0"}} {requests * ttft_s}
vllm:request_queue_time_seconds_sum{{engine="0"}} {requests * queue_s}
vllm:request_queue_time_seconds_count{{engine="0"}} {requests}
vllm:prefix_cache_queries_total{{engine="0"}} {requests * 1000}
vllm:prefix_cache_hits_total{{engine="0"}} {requests * 1000 * hits}
vllm:num_preemptions_total{{engine="0"}} {preempted}
vllm:kv_cache_usage_perc{{engine="0"}} 0.5
vllm:num_requests_running{{engine="0"}} {running}
"""


def added(one, other):
    """Counters after both."""
    lines = []
    for first, second in zip(one.splitlines(), other.splitlines(), strict=True):
        name, _, value = first.rpartition(" ")
        is_counter = "_total{" in name or "_sum{" in name or "_count{" in name
        more = float(second.rpartition(" ")[2]) if is_counter else 0.0
        lines.append(f"{name} {float(value) + more}" if is_counter else first)
    return "\n".join(lines)


class Server:
    """Answers with `text`, which may change, or with an error."""

    def __init__(self):
        self.text, self.code, self.num_asked = metrics(100), 200, 0
        self.delay_s = 0.0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.num_asked += 1
                time.sleep(outer.delay_s)
                body = outer.text.encode()
                self.send_response(outer.code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


def unused_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def scrape(text):
    return Document(path="http://server/metrics", text=text)


def test_fetch_gives_the_text(server):
    assert fetch(server.url, timeout_s=5) == metrics(100)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("server:8000/metrics", "no address of a web server; write http://HOST:PORT/metrics"),
        ("file:///etc/passwd", "no address of a web server"),
        ("http://", "no address of a web server"),
        ("http://host:port/", "is no address; write"),
        ("http://[::1/", "is no address"),
        ("http://user:secret@host/metrics", "a user or a password is not supported"),
        ("http://host/a b", "characters that no address has"),
        ("http://host/\x1b[31m", "characters that no address has"),
    ],
)
def test_what_is_no_address_is_refused(url, message):
    with pytest.raises(ConfigError, match=message) as raised:
        fetch(url, timeout_s=5)
    assert "secret" not in str(raised.value)


def test_a_server_that_is_not_there():
    with pytest.raises(ConfigError, match=r"cannot be reached: Connection refused"):
        fetch(f"http://127.0.0.1:{unused_port()}/metrics", timeout_s=5)


def test_a_server_that_answers_an_error_or_too_late(server):
    server.code = 404
    with pytest.raises(ConfigError, match="answers 404; metrics are often at /metrics"):
        fetch(server.url, timeout_s=5)
    server.code, server.delay_s = 200, 1.0
    with pytest.raises(ConfigError, match=r"does not answer within 0\.1 s"):
        fetch(server.url, timeout_s=0.1)


def test_a_proxy_is_not_asked(server, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{unused_port()}")
    assert fetch(server.url, timeout_s=5)


def test_the_window_is_what_came_since():
    seen = Watch()
    first = seen.add(scrape(metrics(1000)))
    assert first.is_since_start
    assert first.diagnosis.verdict == "cannot_say"
    assert first.moving == ()
    # A thousand calm requests, then ten that queue: only those count.
    calm, late = metrics(1000), metrics(10, ttft_s=10.0, queue_s=9.0)
    view = seen.add(scrape(added(calm, late)))
    assert (view.num_scrapes, view.is_since_start) == (2, False)
    assert view.diagnosis.verdict == "routing"
    moving = {each.key: each for each in view.moving}
    assert moving["ttft_mean"].now == "10 s"
    assert moving["ttft_mean"].values == (pytest.approx(1.0), pytest.approx(10.0))
    assert moving["queue"].now == "9 s"
    assert "running" not in moving


def test_the_window_moves_along():
    seen = Watch()
    for number in range(WINDOW + 2):
        view = seen.add(scrape(metrics(100 * (number + 1))))
    told = {each.key: each.values[-1] for each in view.moving}
    assert told["num_requests"] == 100 * WINDOW


def test_after_a_restart_of_the_server_it_goes_on():
    seen = Watch()
    seen.add(scrape(metrics(1000)))
    view = seen.add(scrape(metrics(10)))
    assert any("before a restart" in note for note in view.diagnosis.notes)
    assert view.moving


def test_arms_of_a_file_are_held_against_what_is_live():
    source = Source(path="x.toml", line=1)
    arm = {"name": "plain", "cache": "off", "ttft_p50": 12.0}
    known = [
        Fact(key=key, value=value, source=source, scope="arms", owner="plain")
        for key, value in arm.items()
    ]
    view = Watch(known).add(scrape(metrics(500)))
    assert view.diagnosis.verdict == "no_fault"
    assert "1 s instead of 12 s" in str(view.diagnosis.healthy[0])
    assert "http://server/metrics" in str(view.diagnosis.healthy[0])


def test_a_page_of_other_things_is_refused():
    with pytest.raises(ConfigError, match="no metrics that are known; vLLM's are at"):
        Watch().add(scrape("<html>hello</html>"))


def test_bars():
    assert spark([1, 2, 3]) == "▁▅█"
    assert spark([2, 2]) == "▁▁"


def run_watch(server, capsys, steps, **options):
    """Watch without a terminal; `steps` are called one after each look, then comes Ctrl-C."""
    left = iter(steps)

    def sleep(seconds):
        assert seconds == 2.0
        step = next(left, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    watch(server.url, "2s", (), (), sleep=sleep, **options)
    return capsys.readouterr()


def test_a_line_each_time_without_a_terminal(server, capsys):
    views = []
    printed = run_watch(
        server,
        capsys,
        [lambda: setattr(server, "text", metrics(200, queue_s=0.9))],
        on_view=views.append,
    )
    lines = printed.out.splitlines()
    assert lines[0] == "verdict: cannot say"
    assert lines[1].startswith("verdict: routing; ")
    assert "is the queue (http://127.0.0.1" in lines[1]
    assert "queue 1.79 s" in lines[1]
    assert printed.err == ""
    assert len(views) == server.num_asked == 2


def test_a_server_that_is_away_for_a_while_is_waited_for(server, capsys):
    printed = run_watch(
        server,
        capsys,
        [
            lambda: setattr(server, "code", 503),
            lambda: (setattr(server, "code", 200), setattr(server, "text", metrics(150))),
        ],
    )
    assert len(printed.out.splitlines()) == 2
    assert "answers 503" in printed.err


def ended(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(["doctor", *map(str, args)])
    return end.value.code, capsys.readouterr()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--every", "0s"], "--every 0s: from 0.1s to 1h"),
        (["--every", "2h"], "--every 2h: from 0.1s to 1h"),
        (["--every", "soon"], "soon"),
        (["--html", "x.html"], "--html is a page of files"),
        (["--json", "-"], "write --json FILE"),
        (["missing.toml"], "missing.toml cannot be read"),
    ],
)
def test_wrong_usage_is_said(server, capsys, args, message):
    code, printed = ended(capsys, "--watch", server.url, *args)
    assert (code, printed.out) == (2, "")
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert server.num_asked == 0


def test_the_first_look_has_to_succeed(server, capsys):
    url = f"http://127.0.0.1:{unused_port()}/metrics"
    code, printed = ended(capsys, "--watch", url)
    assert code == 2
    assert "cannot be reached: Connection refused" in printed.err
    server.text = "hello"
    code, printed = ended(capsys, "--watch", server.url)
    assert code == 2
    assert "no metrics that are known" in printed.err


@contextmanager
def watching(server, *args, **options):
    """The command, as a process, which ends with the test."""
    run = [sys.executable, "-m", "headstart", "doctor", "--watch", server.url, "--every", "0.2s"]
    with subprocess.Popen([*run, *map(str, args)], **options) as process:
        try:
            yield process
        finally:
            process.kill()  # a test that fails would wait for it


def test_ctrl_c_ends_a_process_without_a_terminal(server, tmp_path):
    path = tmp_path / "state.json"
    pipe = subprocess.PIPE
    with watching(server, "--json", path, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "verdict: cannot say\n"
        server.text = metrics(300, queue_s=0.95)
        while "routing" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (0, "")
    told = json.loads(path.read_text(encoding="utf-8"))
    assert (told["schema"], told["verdict"]) == ("headstart.doctor/1", "routing")


def read_until(descriptor, words):
    """What a terminal got, up to `words`."""
    shown, until = "", time.monotonic() + WAIT_S
    while words not in shown:
        assert time.monotonic() < until, shown
        if select.select([descriptor], [], [], 0.5)[0]:
            shown += os.read(descriptor, 1 << 16).decode(errors="replace")
    return shown


def test_the_screen_of_a_terminal_and_ctrl_c(server):
    main_end, its_end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40", "NO_COLOR": "1"}
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), its_end)
    with watching(server, **ends, env=environment) as process:
        os.close(its_end)
        shown = read_until(main_end, "No figure has moved yet.")
        assert "\x1b[?1049h" in shown, "a screen of its own"
        assert "Ctrl-C ends." in shown
        server.text = metrics(300, queue_s=0.95)
        shown = read_until(main_end, "what moves")
        assert "verdict: routing" in shown
        shown = read_until(main_end, "num_requests")
        server.code = 500
        shown = read_until(main_end, "answers 500")
        assert "below is what was known before" in read_until(main_end, "before")
        process.send_signal(signal.SIGINT)
        shown = read_until(main_end, "\x1b[?1049l")
        process.wait(timeout=WAIT_S)
        while "verdict: " not in shown.rpartition("\x1b[?1049l")[2]:
            shown += os.read(main_end, 1 << 16).decode(errors="replace")
    os.close(main_end)
    assert process.returncode == 0
    assert "\x1b[?25h" in shown, "the cursor is back"
    assert "Traceback" not in shown
