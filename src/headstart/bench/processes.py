"""A load that several client processes send: one is soon busier than the server it measures.

    this process                     each client
    its share of the load        ->  reaches the server
                                 <-  ready
    the common start             ->  waits for it
                                 <-  how many are done, again and again
                                 <-  what came of each request

Sessions are dealt out in turn, and stay where they are. In a closed loop each client has its share
of the concurrency, so that at the end some may be idle while others still have sessions.
Times are of one clock: Linux's monotonic one, which `time.perf_counter` reads in every process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from headstart.bench.drive import Advance, Pace, Target, drive, starts_of
from headstart.bench.load import Ask
from headstart.bench.orphans import end_with
from headstart.bench.run import Request
from headstart.errors import ConfigError, HeadstartError

_LEAD_S = 0.1
"""From the message with the common start to the start."""
_END_S = 5.0
_READY, _DONE, _FOUND, _ERROR = "ready", "done", "found", "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one client sends."""

    numbers: tuple[int, ...]
    """Of its asks, among all."""
    asks: tuple[Ask, ...]
    pace: Pace
    starts: dict[str, float]


def send(
    asks: Sequence[Ask], target: Target, pace: Pace, advance: Advance = lambda done: None
) -> tuple[list[Request], float]:
    """Send everything, by as many processes as `pace` says.

    What came of each ask, in their order, and seconds in all. Raises ConfigError where the server
    cannot be reached or the load not be split; HeadstartError where a client dies.
    """
    shares = split(asks, pace)
    if len(shares) == 1:
        return asyncio.run(drive(asks, target, pace, advance))
    clients = [_Client() for _ in shares]
    try:
        with _interrupts_ignored():  # clients inherit that: this process ends them
            for client in clients:
                client.start()
        for share, client in zip(shares, clients, strict=True):
            client.tell((share, target))
        for client in clients:
            client.receive()
        started = time.perf_counter() + _LEAD_S
        for client in clients:
            client.tell(started)
        _listen(clients, advance)
    finally:
        for client in clients:
            client.end()
    requests: list[Request | None] = [None] * len(asks)
    for share, client in zip(shares, clients, strict=True):
        for number, request in zip(share.numbers, client.requests, strict=True):
            requests[number] = request
    seconds = max(client.seconds for client in clients)
    return [each for each in requests if each is not None], seconds


def split(asks: Sequence[Ask], pace: Pace) -> list[Share]:
    """The shares of a load. Raises ConfigError where there is too little for each client."""
    sessions: dict[str, list[int]] = {}
    for number, ask in enumerate(asks):
        sessions.setdefault(ask.session, []).append(number)
    count = pace.processes
    for what, least in (("sessions", len(sessions)), ("sessions at once", pace.concurrency)):
        if count < 1 or (least is not None and least < count):
            raise ConfigError(
                f"{count} processes cannot share {least} {what}; each needs one at least"
            )
    starts = starts_of(asks, pace)
    shares = []
    for index in range(count):
        numbers = sorted(
            number for mine in list(sessions.values())[index::count] for number in mine
        )
        mine = tuple(asks[number] for number in numbers)
        at_once = pace.concurrency and _part(pace.concurrency, index, count)
        shares.append(
            Share(
                numbers=tuple(numbers),
                asks=mine,
                pace=replace(pace, concurrency=at_once, processes=1),
                starts={ask.session: starts[ask.session] for ask in mine} if starts else {},
            )
        )
    return shares


def _part(whole: int, index: int, count: int) -> int:
    return whole // count + (index < whole % count)


class _Client:
    """A client process, as its parent sees it."""

    def __init__(self) -> None:
        # Not a fork: that would share the parent's sockets and event loop.
        context = get_context("spawn")
        self.connection, self._theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(self._theirs, os.getpid()), daemon=True)
        self.num_done = 0
        self.requests: list[Request] = []
        self.seconds = 0.0

    def start(self) -> None:
        self._process.start()
        self._theirs.close()

    def tell(self, message: object) -> None:
        """Raises HeadstartError if it is gone."""
        try:
            self.connection.send(message)
        except OSError:
            raise self._gone() from None

    def receive(self) -> tuple[str, Any]:
        """Its next message. Raises ConfigError as it did, HeadstartError if it is gone."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if kind == _ERROR:
            raise ConfigError(value)
        return kind, value

    def _gone(self) -> HeadstartError:
        self._process.join(_END_S)
        return HeadstartError(
            f"a client process ended by itself (exit code {self._process.exitcode}): what it "
            "measured is lost"
        )

    def end(self) -> None:
        """However far it is."""
        self.connection.close()
        if self._process.pid is not None:
            self._process.terminate()
            self._process.join(_END_S)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
        self._process.close()


def _listen(clients: Sequence[_Client], advance: Advance) -> None:
    """Until every client has told what it found."""
    waiting = {client.connection: client for client in clients}
    while waiting:
        for connection in wait(list(waiting)):
            assert isinstance(connection, Connection)
            client = waiting[connection]
            kind, value = client.receive()
            if kind == _FOUND:
                client.requests, client.seconds = value
                del waiting[connection]
            else:
                client.num_done = value
                advance(sum(each.num_done for each in clients))


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _run(connection: Connection, parent: int) -> None:
    """The life of a client: see the module."""
    end_with(parent)

    def meet() -> float:
        connection.send((_READY, None))
        return float(connection.recv())

    try:
        share, target = connection.recv()
        try:
            sent = drive(
                share.asks,
                target,
                share.pace,
                lambda done: connection.send((_DONE, done)),
                starts=share.starts,
                meet=meet,
            )
            connection.send((_FOUND, asyncio.run(sent)))
        except ConfigError as error:
            connection.send((_ERROR, str(error)))
    except (EOFError, OSError):
        return  # nobody is there any more who would want to know
