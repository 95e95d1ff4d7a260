"""The control socket: one thread a connection, and what the messages mean.

Only processes of the node's own user are served (`SO_PEERCRED`). Whatever arrives on a connection,
the worst that can happen to it is that it is closed; nothing that one client does reaches another.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headstart.errors import ConfigError, HeadstartError
from headstart.keys import Namespace
from headstart.node import protocol
from headstart.node.services import Services
from headstart.node.sessions import Session, make_chain

_log = logging.getLogger(__name__)
MAX_CONNECTIONS = 1024
_FRAME_S = 5.0
_MAP_S = 120.0
_ACCEPT_AGAIN_S = 0.1
_PEER = struct.Struct("3i")
_COMMANDS = (
    *(protocol.Decisions, protocol.Record, protocol.Status),
    *(protocol.Stop, protocol.Clear, protocol.Verify),
)
_MAX_PATH = 107  # sockaddr_un


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A socket that listens at `path`, mode 0600, for as long as the block runs.

    The folder is made with mode 0700 when it is not there. A lock beside the socket makes sure that
    there is one node a path; what an earlier one left is removed.
    Raises ConfigError when a node runs there, or the path cannot be used.
    """
    if len(os.fsencode(path)) > _MAX_PATH:
        raise ConfigError(f"--socket {path}: a socket's path has at most {_MAX_PATH} bytes")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--socket {path}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"a node is running at {path} already") from error
        _remove_stale(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            mask = os.umask(0o177)
            try:
                server.bind(os.fspath(path))
            except OSError as error:
                raise ConfigError(f"--socket {path}: {error.strerror}") from error
            finally:
                os.umask(mask)
            server.listen(128)
            try:
                yield server
            finally:
                path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _remove_stale(path: Path) -> None:
    """Remove the socket that an earlier node left. Raises ConfigError for anything else there."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise ConfigError(f"--socket {path}: there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        error = probe.connect_ex(os.fspath(path))
    if error in (0, errno.EAGAIN):  # a node would hold the lock
        raise ConfigError(f"--socket {path}: another program listens there")
    path.unlink(missing_ok=True)


class Server:
    """Accepts connections until `close()`."""

    def __init__(
        self, server: socket.socket, services: Services, stop: Callable[[float], None]
    ) -> None:
        """`stop(timeout_s)` is called when a client asks the node to end; it returns at once."""
        self._server, self._services, self._stop = server, services, stop
        self._connections: set[socket.socket] = set()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self.num_garbage = 0
        """Connections closed for what they sent."""
        self._thread = threading.Thread(target=self._accept, name="headstart-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close every connection and accept no more."""
        with self._lock:
            self._closing.set()
            connections = list(self._connections)
        for sock in (self._server, *connections):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._server.accept()
            except OSError as error:
                if not self._closing.is_set():
                    _log.warning("no connection can be accepted: %s", error)
                    time.sleep(_ACCEPT_AGAIN_S)  # descriptors or memory will be given back
                continue
            if not self._admit(sock):
                sock.close()
                continue
            with self._lock:
                if self._closing.is_set():
                    sock.close()
                    return
                self._connections.add(sock)
            try:
                threading.Thread(
                    target=self._serve, args=(sock,), name="headstart-connection", daemon=True
                ).start()
            except RuntimeError as error:  # no more threads
                _log.warning("no connection can be served: %s", error)
                self._forget(sock)

    def _admit(self, sock: socket.socket) -> bool:
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        pid, uid, _ = _PEER.unpack(peer)
        if uid not in (os.geteuid(), 0):
            _log.warning("refused process %d of user %d: a node serves one user", pid, uid)
            return False
        if len(self._connections) >= MAX_CONNECTIONS:
            _log.warning("refused process %d: %d connections are open", pid, MAX_CONNECTIONS)
            return False
        return True

    def _serve(self, sock: socket.socket) -> None:
        connection = _Connection(sock, self._services, self._stop)
        try:
            connection.run()
        except TimeoutError:
            _log.warning("a connection is closed: its client stopped in the middle of a message")
        except (EOFError, OSError):
            pass  # the client went, or did not take its answer
        except HeadstartError as error:
            with self._lock:
                self.num_garbage += 1
            _log.warning("a connection is closed: %s", error)
        except Exception:  # noqa: BLE001 - a thread's top: a bug costs one connection
            _log.exception("a connection is closed by a bug")
        finally:
            try:
                connection.close()
            finally:
                self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._connections.discard(sock)
        sock.close()


class _Connection:
    """One client."""

    def __init__(
        self, sock: socket.socket, services: Services, stop: Callable[[float], None]
    ) -> None:
        self._sock, self._services, self._stop = sock, services, stop
        self._sessions = services.sessions
        self._session: Session | None = None
        self._worker: bytes | None = None

    def run(self) -> None:
        """Answer until the client closes."""
        while True:
            self._sock.settimeout(None)
            if not self._sock.recv(1, socket.MSG_PEEK):
                return
            request = protocol.unpack_request(
                protocol.receive(self._sock, time.monotonic() + _FRAME_S)
            )
            if isinstance(request, protocol.Attach):
                self._attach(request)
                return
            if isinstance(request, protocol.Hello):
                self._hello(request)
                continue
            reply = self._answer(request)
            try:
                if reply is not None:
                    self._send(reply)
            finally:
                if isinstance(request, protocol.Stop):  # answered first: the end closes connections
                    self._stop(request.timeout_s)

    def close(self) -> None:
        """The client is gone."""
        self._services.recorder.stop(self)
        if self._session is not None:
            self._sessions.leave(self._session, self)
        if self._worker is not None:
            self._sessions.detach(self._worker)

    def _send(self, reply: protocol.Reply, fd: int | None = None) -> None:
        self._sock.settimeout(_FRAME_S)
        frame = protocol.pack(reply)
        if fd is None:
            self._sock.sendall(frame)
        else:
            sent = socket.send_fds(self._sock, [frame], [fd])
            self._sock.sendall(frame[sent:])

    def _attach(self, request: protocol.Attach) -> None:
        """Give a worker the arena, then wait for its end: it says nothing more."""
        _check_token(request.worker)
        arena = self._services.store.arena
        welcome = protocol.Welcome(self._services.boot, arena.nbytes)
        self._send(welcome, arena.fd)
        # It says so again when it has mapped the arena, which can take a while.
        body = protocol.receive(self._sock, time.monotonic() + _MAP_S)
        if protocol.unpack_request(body) != request:
            raise protocol.ProtocolError("a worker confirms its own token")
        self._worker = request.worker
        self._sessions.attach(request.worker)
        self._send(welcome)  # without this it would be a worker too early, and miss
        self._sock.settimeout(None)
        while self._sock.recv(4096):
            pass

    def _hello(self, request: protocol.Hello) -> None:
        for token in (request.session, *request.workers):
            _check_token(token)
        if self._session is not None or len(request.workers) > protocol.MAX_WORKERS:
            raise protocol.ProtocolError("one session a connection, with at most 1024 workers")
        session, fd = self._sessions.open(request.session, request.workers, request.claims, self)
        self._session = session
        try:
            self._send(protocol.Welcome(self._services.boot, 0), fd)
        finally:
            os.close(fd)

    def _answer(self, request: protocol.Request) -> protocol.Reply | None:
        try:
            if isinstance(request, _COMMANDS):
                return self._answer_command(request)
            if self._session is None:
                raise protocol.ProtocolError("a session begins with Hello")
            return self._answer_engine(self._session, request)
        except protocol.ProtocolError:
            raise
        except (HeadstartError, ValueError, RecursionError) as error:
            if request.is_told:
                _log.warning("%s was refused: %s", type(request).__name__, error)
                return None
            return protocol.Failed(str(error))

    def _answer_command(self, request: protocol.Request) -> protocol.Reply:
        match request:
            case protocol.Stop():
                return protocol.Done("the node writes what is queued and ends")
            case protocol.Clear():
                return protocol.Done(self._services.clear(request.namespace))
            case protocol.Verify():
                return protocol.State(self._services.verify())
            case protocol.Decisions():
                return protocol.State(self._services.decisions.after(request.after))
            case protocol.Record():
                return self._services.recorder.take(self, request.namespace)
            case _:
                return protocol.State(self._services.status())

    def _answer_engine(self, session: Session, request: protocol.Request) -> protocol.Reply | None:
        sessions = self._sessions
        match request:
            case protocol.Promote():
                started = time.monotonic()
                chain = make_chain(
                    request.namespace, request.block_nbytes, protocol.split_keys(request.keys)
                )
                promoted = sessions.promote(session, self, request, chain)
                self._services.metrics.lookup(time.monotonic() - started)
                self._services.recorder.see(request)
                return promoted
            case protocol.Claim():
                return sessions.claim(session, self, request.ticket)
            case protocol.Reserve():
                chain = make_chain(
                    request.namespace,
                    request.block_nbytes,
                    protocol.split_keys(request.keys),
                    request.parent,
                )
                return sessions.reserve(session, self, request, chain)
            case protocol.OpenNamespace():
                namespace = Namespace.from_json(request.text)
                self._services.store.open_namespace(namespace)
                self._services.recorder.knows(namespace.id, namespace.layout.block_size)
                return protocol.Opened(self._services.learnt.get(namespace.id))
            case protocol.Learnt():
                self._services.learnt.put(request.namespace, request.costs)
            case protocol.Decided():
                self._services.decisions.add(request)
            case protocol.Unclaim() | protocol.Release() | protocol.Commit() | protocol.Abandon():
                sessions.tell(session, request)
        return None


def _check_token(token: bytes) -> None:
    if len(token) != protocol.TOKEN_NBYTES:
        raise protocol.ProtocolError(f"a token has {protocol.TOKEN_NBYTES} bytes")
