"""The control socket: whatever one client sends or leaves undone, the others do not notice."""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headstart.errors import ConfigError
from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.node import protocol, server
from headstart.node.server import listening
from headstart.types import MAX_BLOCK_NBYTES

SOON = 20.0
BLOCK = 64 << 10
LAYOUT = BlockLayout(block_size=16, axes="byte", shape=(BLOCK,), dtype="uint8")
NAMESPACE = Namespace(model="node", weights="none", layout=LAYOUT)
HELLO = protocol.Hello(b"s" * 16, ())
KEYS = protocol.join_keys(keys_from_hashes(NAMESPACE, [b"a", b"b"]).keys)


def chain(path):
    return keys_from_hashes(NAMESPACE, [str(content).encode() for content in path])


def header(nbytes, magic=b"HSTN", version=protocol.PROTOCOL_VERSION):
    return struct.pack("<4sBBHI", magic, version, 0, 0, nbytes)


def frame(body):
    return header(len(body)) + body


def answer(sock):
    """The next reply; None when the connection is closed."""
    try:
        return protocol.unpack_reply(protocol.receive(sock, time.monotonic() + SOON))
    except (EOFError, ConnectionResetError):
        return None


def tell(sock, *messages):
    sock.sendall(b"".join(map(protocol.pack, messages)))


def greet(sock, hello=HELLO):
    tell(sock, hello)
    assert isinstance(answer(sock), protocol.Welcome)
    return sock


def asked(sock, message):
    tell(sock, message)
    return answer(sock)


def is_served(sock):
    return isinstance(asked(sock, protocol.Status()), protocol.State)


def connections():
    return sum(thread.name == "headstart-connection" for thread in threading.enumerate())


@pytest.fixture
def bystander(connect, soon):
    """A client that must be served all the time; at the end only its thread is left."""
    sock = greet(connect(), protocol.Hello(secrets.token_bytes(16), ()))
    yield sock
    assert is_served(sock)
    soon(lambda: connections() == 1, "an end of the other connections' threads")


# ------------------------------------------------------------------------------------------ garbage


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "magic": header(5, magic=b"hstn") + b"12345",
    "version": header(5, version=2) + b"12345",
    "a byte too long": header(protocol.MAX_MESSAGE_NBYTES + 1),
    "4 GiB": header(2**32 - 1),
    "empty": frame(b""),
    "nested lists": frame(b"\x91" * 100_000),
    "nested maps": frame(b"\x81\xa1a" * 100_000),
    "4 G of fields": frame(b"\xdd\xff\xff\xff\xff"),
    "no text": frame(b"\x92\xa4open\xa2\xff\xfe"),
    "another type": frame(b"\x92\xa5claim\xa11"),
    "a reply": protocol.pack(protocol.Done("a reply is no request")),
    "asked without hello": protocol.pack(protocol.Claim(1)),
    "told without hello": protocol.pack(protocol.Release(1)),
    "short session": protocol.pack(protocol.Hello(b"short", ())),
    "short worker": protocol.pack(protocol.Hello(b"s" * 16, (b"short",))),
    "many workers": protocol.pack(protocol.Hello(b"s" * 16, (b"w" * 16,) * 1025)),
    "no worker": protocol.pack(protocol.Attach(b"")),
    "hello twice": protocol.pack(HELLO) * 2,
    "two workers": protocol.pack(protocol.Attach(b"w" * 16)) + protocol.pack(HELLO),
    "worker's garbage": protocol.pack(protocol.Attach(b"w" * 16)) + b"x" * 100,
    "odd keys": protocol.pack(HELLO)
    + protocol.pack(protocol.Promote(1, 1, NAMESPACE.id, BLOCK, b"odd")),
    "odd new keys": protocol.pack(HELLO)
    + protocol.pack(protocol.Reserve(1, b"", 1, bytes(33), None)),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_closes_its_connection_and_is_counted(world, connect, bystander, caplog, name):
    with connect() as sock:
        sock.sendall(GARBAGE[name])
        while answer(sock) is not None:
            pass
    assert is_served(bystander)
    assert world.server.num_garbage == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "a connection is closed: " in record.getMessage()
    assert len(record.getMessage()) < 500
    assert world.counts(engines=1, sessions=1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.binary(min_size=1, max_size=400), st.booleans())
def test_no_bytes_whatever_harm_the_node(connect, bystander, data, is_framed):
    with connect() as sock:
        sock.sendall(frame(data) if is_framed else data)
        sock.shutdown(socket.SHUT_WR)
        while answer(sock) is not None:
            pass
    assert is_served(bystander)


wild = st.sampled_from(
    [0, 1, -1, 2, 4095, 4096, 65536, BLOCK, 2**31, 2**63 - 1, 2**64 - 1, -(2**63)]
)
spaces = st.sampled_from([NAMESPACE.id, bytes(32), b"", b"x"])
runs = st.sampled_from([b"", KEYS, KEYS[:32], KEYS * 40, bytes(32 * 1000)])
parents = st.sampled_from([None, KEYS[:32], bytes(32), b"", b"short"])
requests = st.one_of(
    st.builds(protocol.Promote, wild, wild, spaces, wild, runs),
    st.builds(protocol.Reserve, wild, spaces, wild, runs, parents),
    st.builds(protocol.Claim, wild),
    st.builds(protocol.Unclaim, wild),
    st.builds(protocol.Release, wild),
    st.builds(protocol.Commit, wild),
    st.builds(protocol.Abandon, wild),
    st.builds(protocol.OpenNamespace, st.text(max_size=30)),
    st.just(protocol.Clear("")),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(requests, max_size=12))
def test_no_order_of_wild_requests_harms_the_node(world, connect, bystander, caplog, sent):
    """Every one is answered, or refused with the connection open."""
    caplog.clear()
    with greet(connect(), protocol.Hello(secrets.token_bytes(16), ())) as sock:
        for message in sent:
            tell(sock, message)
            if not message.is_told:
                assert answer(sock) is not None, message
        assert is_served(sock)
    assert is_served(bystander)
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]
    assert world.server.num_garbage == 0
    world.memory.check_invariants()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (protocol.Promote(1, 1, NAMESPACE.id, 0, KEYS), "block_nbytes"),
        (protocol.Promote(1, 1, NAMESPACE.id, MAX_BLOCK_NBYTES + 1, KEYS), "block_nbytes"),
        (protocol.Promote(1, 1, NAMESPACE.id, -5, KEYS), "block_nbytes"),
        (protocol.Promote(1, 1, b"space", BLOCK, KEYS), "must be 32 bytes"),
        (protocol.Reserve(1, NAMESPACE.id, BLOCK, KEYS, b"parent"), "must be 32 bytes"),
        (protocol.Reserve(1, bytes(32), BLOCK, KEYS, None), "not open"),
        (protocol.OpenNamespace("no JSON"), "not a namespace"),
        (protocol.OpenNamespace("[" * 100_000), "recursion"),
        (protocol.OpenNamespace('{"layout": {"shape": [1e999]}}'), "not a namespace"),
        (
            protocol.OpenNamespace(
                Namespace(
                    model="huge",
                    weights="w",
                    layout=BlockLayout(block_size=1, axes="b", shape=(1 << 29,), dtype="uint8"),
                ).to_json()
            ),
            "does not fit",
        ),
        (protocol.Clear("zz"), "no namespace starts with 'zz'"),
    ],
    ids=[
        "no bytes",
        "too many bytes",
        "negative",
        "space",
        "parent",
        "unknown space",
        "no JSON",
        "nested JSON",
        "no number",
        "too large for the arena",
        "no such space",
    ],
)
def test_a_request_that_cannot_be_is_refused_with_a_reason(connect, bystander, message, reason):
    with greet(connect()) as sock:
        reply = asked(sock, message)
        assert isinstance(reply, protocol.Failed)
        assert reason in reply.message
        assert is_served(sock), "the connection goes on"


def test_words_and_blocks_that_do_not_exist_promote_nothing(world, connect, bystander):
    world.put("ab")
    with greet(connect()) as sock:
        for word in (-1, protocol.NUM_WORDS, 2**63):
            reply = asked(sock, protocol.Promote(1, word, NAMESPACE.id, BLOCK, KEYS))
            assert (reply.num_held, reply.num_ready, reply.pending) == (2, 0, False)
        for block_nbytes in (1, BLOCK - 1, BLOCK + 1, 1 << 29):
            ticket = block_nbytes
            reply = asked(sock, protocol.Promote(ticket, 1, NAMESPACE.id, block_nbytes, KEYS))
            if reply.pending:
                claimed = asked(sock, protocol.Claim(ticket))
                assert claimed.offsets == ()
            else:
                assert reply.num_ready == 0
        assert world.counts(engines=2, sessions=2), "nothing is left behind"


# ----------------------------------------------------------------------------- slow and silent ones


@pytest.fixture
def short_frames(monkeypatch):
    monkeypatch.setattr(server, "_FRAME_S", 0.2)


@pytest.mark.parametrize("kept", [1, 11, 12, 20])
def test_half_a_frame_is_cut_after_the_deadline(short_frames, connect, bystander, caplog, kept):
    with connect() as sock:
        sock.sendall(protocol.pack(protocol.Clear("some text"))[:kept])
        assert answer(sock) is None
    assert "in the middle of a message" in caplog.text
    assert is_served(bystander)


def test_an_idle_connection_may_wait_for_longer_than_a_frame(short_frames, connect, bystander):
    with connect() as sock:
        time.sleep(0.5)
        assert is_served(sock)


def test_a_client_that_never_reads_blocks_nobody(short_frames, connect, bystander, soon):
    with connect() as sock:
        sock.settimeout(0.1)
        is_full = False
        for _ in range(10_000):  # answers nobody reads are not kept without bound
            try:
                sock.send(protocol.pack(protocol.Status()) * 50)
            except OSError:
                is_full = True
                break
            assert is_served(bystander)
        assert is_full
        assert is_served(bystander)
        soon(lambda: connections() == 1, "an end of its thread")


def test_a_worker_that_does_not_confirm_is_cut(monkeypatch, world, connect, bystander):
    monkeypatch.setattr(server, "_MAP_S", 0.2)
    with connect() as sock:
        tell(sock, protocol.Attach(b"w" * 16))
        assert isinstance(answer(sock), protocol.Welcome)
        assert world.counts(engines=1, sessions=1), "it has mapped nothing yet"
        assert answer(sock) is None


def test_what_a_worker_says_later_is_not_listened_to(world, connect, bystander, soon):
    with connect() as sock:
        tell(sock, protocol.Attach(b"w" * 16))
        assert isinstance(answer(sock), protocol.Welcome)
        tell(sock, protocol.Attach(b"w" * 16), protocol.Stop(0), protocol.Clear(""))
        sock.sendall(b"x" * 100_000)
        assert isinstance(answer(sock), protocol.Welcome)
        assert world.counts(engines=1, sessions=1, workers=1)
    soon(lambda: world.counts(engines=1, sessions=1))
    assert world.stops == []


def test_a_slow_request_of_one_does_not_keep_others_waiting(world, connect, bystander):
    world.put("ab")
    world.forget_memory()
    world.slow.stall()
    with greet(connect()) as sock:
        assert asked(sock, protocol.Promote(1, 1, NAMESPACE.id, BLOCK, KEYS)).pending
        tell(sock, protocol.Verify())
        for _ in range(20):
            assert is_served(bystander)
        world.slow.resume()
        assert isinstance(answer(sock), protocol.State)


# ------------------------------------------------------------------------------------- many of them


def test_a_hundred_connections_come_and_go(world, connect, bystander, soon):
    socks = [connect() for _ in range(100)]
    for sock in socks[::2]:
        assert is_served(sock)
    for sock in socks:
        sock.close()
    soon(lambda: connections() == 1)
    assert len(world.server._connections) == 1


def test_beyond_the_limit_connections_are_closed(monkeypatch, connect, bystander, soon):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    kept = [connect(), connect()]
    assert all(map(is_served, kept))
    with connect() as sock:
        assert answer(sock) is None
    kept[0].close()
    soon(lambda: connections() == 2)
    with connect() as sock:
        assert is_served(sock)
    kept[1].close()


class Failing:
    """A listening socket whose first accepts fail."""

    def __init__(self, sock, num_failures):
        self.sock, self.num_failures = sock, num_failures

    def accept(self):
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self.sock.accept()

    def shutdown(self, how):
        self.sock.shutdown(how)


def test_out_of_descriptors_is_not_the_end(world, tmp_path, caplog, soon):
    with listening(tmp_path / "other.sock") as sock:
        node = server.Server(Failing(sock, 2), world.services, lambda timeout_s: None)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(os.fspath(tmp_path / "other.sock"))
            client.settimeout(SOON)
            assert is_served(client)
        assert "no connection can be accepted: Too many open files" in caplog.text.replace(
            "[Errno 24] ", ""
        )
        node.close()
        node._thread.join(SOON)
        assert not node._thread.is_alive()


def test_out_of_threads_is_not_the_end(monkeypatch, world, connect, bystander, caplog):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "headstart-connection":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with connect() as sock:
            assert answer(sock) is None
    assert "can't start new thread" in caplog.text
    with connect() as sock:
        assert is_served(sock)


def test_a_bug_costs_one_connection(monkeypatch, world, connect, bystander, caplog):
    def broken(text):
        raise KeyError(text)

    with monkeypatch.context() as patched, greet(connect()) as sock:
        patched.setattr(world.services, "clear", broken)
        assert asked(sock, protocol.Clear("")) is None
    assert "closed by a bug" in caplog.text
    assert world.counts(engines=1, sessions=1)


# ------------------------------------------------------------------------------------- the commands


def test_commands_need_no_session(world, connect, soon):
    world.put("ab")
    with connect() as sock:
        state = asked(sock, protocol.Status()).fields
        assert state["schema"] == "headstart.node.status/1"
        assert state["pid"] == os.getpid()
        assert state["tiers"]["file"]["num_blocks"] == 2
        assert state["namespaces"]["memory"] == {NAMESPACE.id.hex(): 2 * BLOCK}
        json.dumps(state, allow_nan=False)
        verified = asked(sock, protocol.Verify()).fields
        assert (verified["good"], verified["schema"]) == (True, "headstart.node.verify/1")
        assert asked(sock, protocol.Stop(3.5)) == protocol.Done(
            "the node writes what is queued and ends"
        )
    soon(lambda: world.stops == [3.5])


def test_a_node_is_stopped_after_its_answer_or_without(world, connect, monkeypatch, soon):
    answered = []
    send = server._Connection._send

    def slow_send(connection, reply, fd=None):
        assert world.stops == [], "the end would close the connection"
        answered.append(reply)
        send(connection, reply, fd)

    monkeypatch.setattr(server._Connection, "_send", slow_send)
    with connect() as sock:
        assert isinstance(asked(sock, protocol.Stop(1.0)), protocol.Done)
    soon(lambda: world.stops == [1.0])
    monkeypatch.setattr(server._Connection, "_send", lambda *args: 1 / 0)
    with connect() as sock:
        assert asked(sock, protocol.Stop(2.0)) is None
    soon(lambda: world.stops == [1.0, 2.0])


def test_one_verification_at_a_time(world, connect, soon):
    world.put("ab")
    world.slow.verify = lambda progress: world.slow.suffer(0) or world.file.verify(progress)
    world.slow.stall()
    with connect() as first, connect() as second:
        tell(first, protocol.Verify())
        soon(lambda: world.slow.num_stalled)
        reply = asked(second, protocol.Verify())
        assert reply.message == "a verification is running already; wait for it"
        world.slow.resume()
        assert answer(first).fields["good"]


def test_clear_forgets_one_model_or_all(world, connect):
    other = Namespace(model="other", weights="none", layout=LAYOUT)
    world.store.open_namespace(other)
    world.put("abc")
    run = keys_from_hashes(other, [b"x", b"y"])
    world.store.store(run, [bytes(BLOCK)] * 2)
    assert world.store.flush(SOON)
    with connect() as sock:
        reply = asked(sock, protocol.Clear(other.id.hex()[:10].upper()))
        assert reply == protocol.Done("forgot 2 blocks of 1 namespaces")
        assert (
            world.store.lookup(run).num_blocks,
            world.store.lookup(chain("abc")).num_blocks,
        ) == (
            0,
            3,
        )
        assert asked(sock, protocol.Clear("")) == protocol.Done("forgot 3 blocks of 2 namespaces")
        assert world.store.lookup(chain("abc")).num_blocks == 0


# ---------------------------------------------------------------------------- the socket's own file


def test_the_socket_is_its_users_alone_and_goes_with_the_node(tmp_path):
    path = tmp_path / "new" / "node.sock"
    with listening(path):
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="a node is running at"), listening(path):
            pass
        assert path.is_socket()
    assert not path.exists()
    with listening(path):
        assert path.is_socket()


def stale(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(os.fspath(path))


def test_a_stale_socket_is_replaced(tmp_path):
    stale(tmp_path / "s")
    with listening(tmp_path / "s") as sock:
        assert sock.getsockname() == os.fspath(tmp_path / "s")


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text("precious"),
        lambda path: path.mkdir(),
        lambda path: path.symlink_to("precious"),
        lambda path: path.symlink_to("not there"),
        lambda path: os.mkfifo(path),
    ],
    ids=["file", "folder", "link", "dangling link", "pipe"],
)
def test_what_is_no_socket_stays(tmp_path, make):
    (tmp_path / "precious").write_text("precious")
    path = tmp_path / "node.sock"
    make(path)
    before = path.lstat()
    with pytest.raises(ConfigError, match="there is a file that is no socket"), listening(path):
        pass
    assert path.lstat() == before


def test_the_socket_of_another_program_stays(tmp_path):
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(os.fspath(path))
        sock.listen(1)
        with pytest.raises(ConfigError, match="another program listens there"), listening(path):
            pass
        assert path.is_socket()


@pytest.mark.parametrize(
    ("name", "message"),
    [("x" * 150, "at most 107 bytes"), ("file/node.sock", "exists|Not a directory")],
)
def test_a_path_that_cannot_be_is_refused(tmp_path, name, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=message), listening(tmp_path / name):
        pass


# ------------------------------------------------------------------------------------ other users

OTHER = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.settimeout(20)
sock.connect(sys.argv[1])
try:
    sock.sendall(bytes.fromhex(sys.argv[2]))
    print(len(sock.recv(100)))
except ConnectionError:
    print(0)
"""


@pytest.mark.root
def test_a_process_of_another_user_is_refused(world, connect, bystander, caplog):
    path = world.path
    command = [sys.executable, "-c", OTHER, path, protocol.pack(protocol.Status()).hex()]
    folders = [folder for folder in path.parents if folder.stat().st_uid == os.geteuid()]
    modes = {folder: folder.stat().st_mode for folder in folders}
    try:
        for folder, mode in modes.items():
            folder.chmod(mode | 0o055)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "PermissionError" in done.stderr, "the file's mode is the first line"
        path.chmod(0o666)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        for folder, mode in modes.items():
            folder.chmod(mode)
    assert done.stdout == "0\n"
    assert "of user 65534: a node serves one user" in caplog.text
    assert is_served(bystander)
