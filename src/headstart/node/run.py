"""The node as a process: opens the store, serves, ends on request, on a signal, or when idle."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from headstart.config import node_socket, open_store
from headstart.node.http import HttpServer
from headstart.node.server import Server, listening
from headstart.node.services import Services
from headstart.settings import Settings

_log = logging.getLogger(__name__)
_TICK_S = 0.2
_SAVE_S = 30.0
_MAX_DRAIN_S = 3600.0
_SWITCH_S = 0.0005
"""Python hands the interpreter over so often, in seconds: an engine waits for an answer at most
about as long, however many threads check what they read."""


def run_node(
    settings: Settings,
    *,
    on_ready: Callable[[Path, int], None] | None = None,
    drain_s: float = 30.0,
) -> None:
    """Serve until a SIGTERM, a SIGINT, a stop message, or `node.idle_exit`. For the main thread.

    Then what is queued is written, for at most `drain_s`, and everything is closed. `on_ready` gets
    the socket and the port of /metrics. Raises ConfigError or TierUnavailableError at start.
    """
    sys.setswitchinterval(_SWITCH_S)
    end = _End(drain_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end.on_signal)
    path = node_socket(settings)
    with listening(path) as sock, open_store(settings) as store:
        services = Services(
            store,
            lease_ttl_s=settings.node.lease_ttl,
            costs_path=settings.tiers[0].root / "costs.json" if settings.tiers else None,
        )
        http = HttpServer(services.metrics, settings.node.metrics_port)
        server = Server(sock, services, end.ask)
        try:
            if on_ready is not None:
                on_ready(path, http.port)
            _wait(services, end, settings.node.idle_exit)
        finally:
            server.close()
            http.close()
            services.close()
            store.close(end.drain_s)


class _End:
    """Whether and how the node is to end."""

    def __init__(self, drain_s: float) -> None:
        self.drain_s = drain_s
        self._asked = threading.Event()
        self._signalled = False

    def on_signal(self, *_: object) -> None:
        """A signal handler may interrupt anything, so it takes no lock: `wait` sees it in time."""
        self._signalled = True

    def ask(self, drain_s: float) -> None:
        """End soon, and spend at most `drain_s` on writing what is queued."""
        self.drain_s = min(max(0.0, drain_s), _MAX_DRAIN_S)  # not a number is 0
        self._asked.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it was asked for within `timeout_s`."""
        return self._asked.wait(timeout_s) or self._signalled


def _wait(services: Services, end: _End, idle_exit_s: float | None) -> None:
    """Sweep expired leases until it is time to end."""
    used_at = saved_at = time.monotonic()
    while not end.wait(_TICK_S):
        services.sessions.beat()
        expired = services.sessions.sweep()
        if expired:
            _log.info("%d leases were not claimed in time", expired)
        if time.monotonic() - saved_at > _SAVE_S:
            saved_at = time.monotonic()
            services.learnt.save_aside()
        counts = services.sessions.counts()
        if counts["sessions"] or counts["workers"]:
            used_at = time.monotonic()
        elif idle_exit_s is not None and time.monotonic() - used_at > idle_exit_s:
            _log.info("no engine for %g s: the node ends", idle_exit_s)
            return
