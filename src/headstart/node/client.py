"""The engine's side of the socket: small, synchronous, without a thread, never in the way.

Every wait is bounded. Every failure is the same answer, `None`: a miss. After one, nothing is asked
for a second, then for two, and so on up to half a minute, so that a node that hangs costs an engine
one short wait and not one a request.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from headstart.errors import HeadstartError
from headstart.keys import Namespace
from headstart.node import protocol
from headstart.node.board import Board
from headstart.node.promise import LATE, Promise
from headstart.types import KeyChain

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Seconds that an engine may wait for the node."""

    ask_s: float = 0.2
    open_s: float = 5.0
    """For opening a namespace, which may write to a disk."""
    retry_s: float = 1.0
    max_retry_s: float = 30.0


class NodeClient:
    """A scheduler's session with the node. For one thread."""

    def __init__(
        self,
        path: Path,
        workers: Sequence[bytes],
        *,
        limits: ClientLimits | None = None,
        is_buffered: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connects with the first question. `workers` are tokens of `ArenaMapping`s, by rank.

        `is_buffered`: what has no answer is sent with the next question, or by `flush()`.
        """
        self._is_buffered, self._outbox = is_buffered, b""
        self._path, self._workers = path, tuple(workers)
        self._limits, self._clock = limits or ClientLimits(), clock
        self._token = secrets.token_bytes(protocol.TOKEN_NBYTES)
        self._sock: socket.socket | None = None
        self._board: Board | None = None
        self._free_words: list[int] = []
        self._next_ticket = 1
        self._claims: set[int] = set()
        self._namespaces: dict[bytes, str] = {}
        self._opened: set[bytes] = set()
        self._costs: dict[bytes, protocol.Costs] = {}
        self._down_until = float("-inf")
        self._retry_s = self._limits.retry_s
        self._refusal = ""
        self._owed: tuple[int, int, float] | None = None
        """Ticket and word of a question whose answer was not waited for, and when it was asked."""
        self.boot = b""
        """Which run of the node this is; what an earlier one gave means nothing."""
        self.num_failures = 0

    def open_namespace(self, namespace: Namespace) -> None:
        """Make a namespace known, now and to every later run of the node."""
        self._namespaces[namespace.id] = namespace.to_json()

    def costs_of(self, namespace: bytes) -> protocol.Costs | None:
        """What an earlier engine of an open namespace has told of its costs."""
        return self._costs.get(namespace) if self._ready(namespace) else None

    def promote(
        self,
        chain: KeyChain,
        asked: protocol.Asked | None = None,
        *,
        budget_s: float | None = None,
    ) -> Promise | None:
        """Look up a prompt's blocks and start to bring what is held into memory.

        As much of it as the node plans, if something is `asked`. With `budget_s`, an answer that
        takes longer is not waited for: the promise `is_late` and of nothing.
        """
        limit_s = self._limits.ask_s
        if not self._ready(chain.namespace) or not self._free_words:
            return None
        if not self._settle(is_urgent=budget_s is not None):
            return None if self._sock is None else Promise(self, None, 0, LATE)
        ticket, word = self._new_ticket(), self._free_words.pop()
        question = protocol.Promote(
            ticket,
            word,
            chain.namespace,
            chain.block_nbytes,
            protocol.join_keys(chain.keys),
            asked,
        )
        asked_at = time.monotonic()
        if not self._send(question, asked_at + limit_s):
            return None
        if budget_s is not None and not self._is_answered(asked_at + min(budget_s, limit_s)):
            self._owed = ticket, word, asked_at
            return Promise(self, None, 0, LATE)
        reply = self._receive(question, protocol.Promoted, asked_at + limit_s)
        is_promised = reply is not None and (reply.pending or reply.num_ready > 0)
        if not is_promised and self._sock is not None:  # else the words went with the connection
            self._free_words.append(word)
        if reply is None:
            return None
        return Promise(self, ticket if is_promised else None, word, reply)

    def reserve(self, chain: KeyChain) -> tuple[int, protocol.Reserved] | None:
        """Slots for new blocks: a ticket, which is claimed if it has slots, and the answer."""
        if not self._ready(chain.namespace):
            return None
        ticket = self._new_ticket()
        reply = self._ask(
            protocol.Reserve(
                ticket,
                chain.namespace,
                chain.block_nbytes,
                protocol.join_keys(chain.keys),
                chain.parent,
            ),
            protocol.Reserved,
        )
        if reply is None:
            return None
        if reply.offsets:
            self._claims.add(ticket)
        return ticket, reply

    def commit(self, ticket: int) -> None:
        """All workers have filled the slots of a reservation."""
        self._claims.discard(ticket)
        self._tell(protocol.Commit(ticket))

    def abandon(self, ticket: int) -> None:
        """The slots of a reservation hold nothing."""
        self._claims.discard(ticket)
        self._tell(protocol.Abandon(ticket))

    def learnt(self, namespace: bytes, costs: protocol.Costs) -> None:
        """What this engine has learnt of its costs."""
        self._tell(protocol.Learnt(namespace, costs))

    def decided(self, decided: protocol.Decided) -> None:
        """What was decided for a request, and what came of it."""
        self._tell(decided)

    def connect(self) -> bool:
        """Whether the node is there; connects if it is time to try."""
        return self._sock is not None or self._connect()

    def flush(self) -> None:
        """Send what has no answer and was not sent yet."""
        if self._sock is None or not self._outbox:
            return
        try:
            self._sock.settimeout(self._limits.ask_s)
            self._sock.sendall(self._take_outbox())
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """End the session. Slots that workers hold stay theirs until they are gone."""
        self.flush()
        self._outbox = b""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self._board, self._free_words, self._owed = None, [], None

    # -- for Promise

    def _claim(self, ticket: int) -> protocol.Claimed | None:
        if self._sock is None:
            return None
        self._claims.add(ticket)
        reply = self._ask(protocol.Claim(ticket), protocol.Claimed)
        if reply is None or not reply.offsets:
            self._claims.discard(ticket)
        return reply

    def _unclaim(self, ticket: int) -> None:
        self._claims.discard(ticket)
        self._tell(protocol.Unclaim(ticket))

    def _release(self, ticket: int, word: int, board: Board | None) -> None:
        self._claims.discard(ticket)
        self._tell(protocol.Release(ticket))
        if board is not None and board is self._board:
            self._free_words.append(word)

    # -- the connection

    def _ready(self, namespace: bytes) -> bool:
        """Whether the node is connected and knows the namespace."""
        if not self.connect():
            return False
        if namespace not in self._opened:
            message = protocol.OpenNamespace(self._namespaces[namespace])
            opened = self._ask(message, protocol.Opened, self._limits.open_s)
            if opened is None:
                return False
            if opened.costs is not None:
                self._costs[namespace] = opened.costs
            self._opened.add(namespace)
        return True

    def _new_ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket

    def _connect(self) -> bool:
        if self._clock() < self._down_until:
            return False
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        fds: list[int] = []
        try:
            deadline = time.monotonic() + self._limits.ask_s
            sock.settimeout(self._limits.ask_s)
            sock.connect(os.fspath(self._path))
            hello = protocol.Hello(self._token, self._workers, tuple(self._claims))
            sock.sendall(protocol.pack(hello))
            welcome = protocol.unpack_reply(protocol.receive(sock, deadline, fds))
            if not isinstance(welcome, protocol.Welcome) or len(fds) != 1:
                raise protocol.ProtocolError("the node does not say Welcome")
            board = Board(fds[0])
        except (OSError, EOFError, ValueError, HeadstartError) as error:
            sock.close()
            self._fail(error)
            return False
        finally:
            for fd in fds:
                os.close(fd)
        if welcome.boot != self.boot:
            self._opened.clear()
        self._sock, self._board, self.boot = sock, board, welcome.boot
        self._free_words = list(range(protocol.NUM_WORDS))
        if self.num_failures:
            _log.info("the node at %s is there again", self._path)
        return True

    def _ask(
        self, message: protocol.Request, wanted: type[_Reply], timeout_s: float | None = None
    ) -> _Reply | None:
        timeout_s = self._limits.ask_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        if not self._settle() or not self._send(message, deadline):
            return None
        return self._receive(message, wanted, deadline)

    def _send(self, message: protocol.Request, deadline: float) -> bool:
        if self._sock is None:
            return False
        try:
            self._sock.settimeout(_left_s(deadline))
            self._sock.sendall(self._take_outbox() + protocol.pack(message))
        except (OSError, HeadstartError) as error:
            self._fail(error)
            return False
        return True

    def _receive(
        self, message: protocol.Request, wanted: type[_Reply], deadline: float
    ) -> _Reply | None:
        """The reply to a message that was sent."""
        assert self._sock is not None
        try:
            self._sock.settimeout(_left_s(deadline))
            reply = protocol.receive_reply(self._sock, deadline)
            if not isinstance(reply, (wanted, protocol.Failed)):
                raise protocol.ProtocolError(f"{type(reply).__name__} is no answer")
        except (OSError, EOFError, HeadstartError) as error:
            self._fail(error)
            return None
        self._retry_s = self._limits.retry_s  # a welcome alone does not prove that it answers
        if isinstance(reply, wanted):
            return reply
        assert isinstance(reply, protocol.Failed)
        refusal = f"the node refused {type(message).__name__}: {reply.message}"
        _log.log(logging.DEBUG if refusal == self._refusal else logging.WARNING, refusal)
        self._refusal = refusal
        return None

    def _is_answered(self, deadline: float) -> bool:
        """Whether something comes by then, be it the end of the connection."""
        assert self._sock is not None
        is_over = deadline <= time.monotonic()
        self._sock.settimeout(0.0 if is_over else _left_s(deadline))
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except (TimeoutError, BlockingIOError):
            return False
        except OSError:
            pass  # whoever reads finds out
        return True

    def _settle(self, *, is_urgent: bool = False) -> bool:
        """Take the answer that was not waited for and give back what it gives; False: not there.

        The next answer would be taken for it. It is waited for as long as any other, or not at all
        by who `is_urgent`: a node that hangs costs one wait and not one a request.
        """
        if self._owed is None:
            return True
        ticket, word, asked_at = self._owed
        deadline = asked_at + self._limits.ask_s
        now = time.monotonic()
        if is_urgent and not self._is_answered(now):
            if now >= deadline:
                self._fail(TimeoutError("it has not answered a look-up"))
            return False
        self._owed = None
        reply = self._receive(protocol.Release(ticket), protocol.Promoted, deadline)
        if reply is not None and (reply.pending or reply.num_ready):
            self._release(ticket, word, self._board)
        elif self._sock is not None:
            self._free_words.append(word)
        return self._sock is not None

    def _tell(self, message: protocol.Request) -> None:
        if self._sock is not None:
            self._outbox += protocol.pack(message)
            if not self._is_buffered:
                self.flush()

    def _take_outbox(self) -> bytes:
        taken, self._outbox = self._outbox, b""
        return taken

    def _fail(self, error: Exception) -> None:
        """Give the connection up: an answer that comes late would be taken for another's."""
        if self._sock is not None or not self.num_failures:
            _log.warning("the node at %s does not answer (%s); going on without", self._path, error)
        self.num_failures += 1
        self._outbox = b""  # the other end forgets what it was about
        self.close()
        self._down_until = self._clock() + self._retry_s
        self._retry_s = min(2 * self._retry_s, self._limits.max_retry_s)


def _left_s(deadline: float) -> float:
    return max(1e-3, deadline - time.monotonic())


def command(path: Path, message: protocol.Request, timeout_s: float) -> protocol.Reply:
    """Ask a node one thing. Raises HeadstartError or OSError with what went wrong."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(min(timeout_s, 5.0))
        sock.connect(os.fspath(path))
        sock.sendall(protocol.pack(message))
        try:
            body = protocol.receive(sock, time.monotonic() + timeout_s)
        except EOFError as error:
            raise protocol.ProtocolError("the node closed the connection") from error
        return protocol.unpack_reply(body)
