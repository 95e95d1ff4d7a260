"""/metrics and /healthz: what they answer, to whom, and that no request harms the node."""

from __future__ import annotations

import contextlib
import logging
import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headstart.errors import ConfigError
from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.node import http
from headstart.node.http import DEFAULT_PORT, HttpServer

SOON = 20.0
BLOCK = 64 << 10
LAYOUT = BlockLayout(block_size=16, axes="byte", shape=(BLOCK,), dtype="uint8")
NAMESPACE = Namespace(model="node", weights="none", layout=LAYOUT)


def chain(path):
    return keys_from_hashes(NAMESPACE, [str(content).encode() for content in path])


@pytest.fixture
def make_server(world):
    """Serves the world's metrics."""
    made = []

    def make(port=0):
        made.append(HttpServer(world.services.metrics, port))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def server(make_server):
    return make_server()


def get(server, path, **headers):
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=SOON) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read()


def raw(server, data, is_read=True):
    """What comes back for bytes as they are."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=SOON) as sock:
        answer = b""
        with contextlib.suppress(OSError):  # closed before it has read all
            sock.sendall(data)
            if not is_read:
                return b""
            sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(65536):
                answer += piece
        return answer


def metrics(server):
    _, _, text = get(server, "/metrics")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_metrics_are_those_of_the_node(world, client, server):
    world.put("abcd")
    world.forget_memory()
    for _ in range(2):
        promise = client.promote(chain("abcd"))
        while not promise.poll()[0]:
            pass
    promise.claim()
    found = metrics(server)
    assert found["headstart_engines", ()] == 1
    assert (found["headstart_leases", ()], found["headstart_leases_claimed", ()]) == (2, 1)
    assert found["headstart_pinned_bytes", ()] == 8 * BLOCK
    assert found["headstart_loads_total", ()] == 2
    assert found["headstart_lookup_seconds_count", ()] == 2
    file = (("tier", "file"),)
    assert found["headstart_tier_hits_total", file] == 4
    assert found["headstart_tier_blocks", file] == 4
    assert found["headstart_load_seconds_count", file] == 1
    held = ("headstart_namespace_bytes", (("namespace", NAMESPACE.id.hex()), ("tier", "file")))
    assert found[held] == 4 * BLOCK


def test_a_query_is_no_matter(server):
    assert get(server, "/metrics?name[]=x")[0] == 200


def test_health(server):
    assert get(server, "/healthz") == (200, "text/plain", b"ok\n")


@pytest.mark.parametrize("path", ["/", "/metric", "/metrics/", "/../etc/passwd"])
def test_another_path_is_not_found(server, path):
    status, _, body = get(server, path)
    assert (status, body) == (404, b"/metrics or /healthz\n")


def test_only_this_machine_is_served(server):
    assert server._server.server_address[0] == "127.0.0.1"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", server.port), timeout=1).close()


# --------------------------------------------------------------------------------- broken requests


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b"HSTN\x02\0\0\0\x01\0\0\0\xc0",
        b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 500 + b"\r\n",
        b"POST /metrics HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n",
        b"DELETE /metrics HTTP/1.1\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: \x00\r\n",
    ],
    ids=range(12),
)
def test_a_broken_request_harms_nothing(server, capfd, request_bytes):
    answer = raw(server, request_bytes)
    assert answer == b"" or answer.startswith((b"HTTP/1.0 ", b"<!DOCTYPE"))
    assert get(server, "/healthz")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_client_that_does_not_wait_for_its_answer(server, soon, capfd):
    for _ in range(5):
        raw(server, b"GET /metrics HTTP/1.0\r\n\r\n", is_read=False)
    assert get(server, "/healthz")[0] == 200
    assert capfd.readouterr().err == "", "no traceback"


def half_a_request(server):
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=SOON)
    sock.sendall(b"GET /met")
    return sock


def test_requests_are_bounded(monkeypatch, make_server, soon):
    monkeypatch.setattr(http, "_MAX_REQUESTS", 3)
    monkeypatch.setattr(http, "_REQUEST_S", SOON)
    server = make_server()
    slow = [half_a_request(server) for _ in range(3)]
    soon(lambda: server._server._free._value == 0)
    assert raw(server, b"GET /healthz HTTP/1.0\r\n\r\n") == b"", "one more is closed at once"
    for sock in slow:
        sock.close()
    soon(lambda: server._server._free._value == 3)
    assert get(server, "/healthz")[0] == 200


def test_slow_requests_are_cut(monkeypatch, make_server, soon):
    monkeypatch.setattr(http, "_REQUEST_S", 0.3)
    server = make_server()
    for sock in [half_a_request(server) for _ in range(3)]:
        assert sock.recv(100) == b"", "it was given up"
        sock.close()
    soon(lambda: server._server._free._value == http._MAX_REQUESTS)


def test_a_store_that_is_closed_meanwhile_is_no_traceback(world, server, caplog, capfd):
    caplog.set_level(logging.INFO)
    world.store.close()
    assert raw(server, b"GET /metrics HTTP/1.0\r\n\r\n") == b""
    assert get(server, "/healthz")[0] == 200
    assert (caplog.text, capfd.readouterr().err) == ("", "")
    world.settled = lambda: None


# -------------------------------------------------------------------------------------------- ports


def test_a_port_that_is_taken_is_refused_when_it_was_asked_for(make_server):
    taken = make_server()
    with pytest.raises(ConfigError, match=rf"node\.metrics_port {taken.port}: .*in use; choose"):
        make_server(taken.port)


def test_the_usual_port_or_a_free_one(make_server):
    first, second = make_server(None), make_server(None)
    assert second.port not in (DEFAULT_PORT, first.port)
    for server in (first, second):
        assert get(server, "/healthz")[0] == 200


def test_a_port_that_is_asked_for_is_taken(make_server):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert make_server(port).port == port
