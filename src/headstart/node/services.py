"""What a node offers, whoever asks: the store with its sessions, and the operator's questions."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from prometheus_client.core import Metric

from headstart.errors import ConfigError
from headstart.metrics import Metrics
from headstart.node.decisions import DecisionLog
from headstart.node.devices import TICK_S, Devices
from headstart.node.learnt import LearntCosts
from headstart.node.promotions import Promotions
from headstart.node.recorder import Recorder
from headstart.node.sessions import Sessions
from headstart.node.tables import planning_metrics
from headstart.store import PrefixStore

_SAVE_S = 5.0
STATUS_SCHEMA = "headstart.node.status/1"


class Services:
    """Owns sessions and promotions; the store stays its maker's to close."""

    def __init__(
        self,
        store: PrefixStore,
        *,
        lease_ttl_s: float = 60.0,
        tick_s: float | None = TICK_S,
        costs_path: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tick_s`: how often somebody looks after the tiers' devices; None: never.

        `costs_path`: where engines' costs outlive the node.
        """
        self.store = store
        self.boot = secrets.token_bytes(16)
        self.devices = Devices(store.lower, tick_s=tick_s)
        self.decisions = DecisionLog()
        self.recorder = Recorder()
        self.learnt = LearntCosts(costs_path)
        self.metrics = Metrics(store.stats, self.usage, self.gauges, self.table)
        # Waiting prompts pin at most half of the memory, so that storing goes on.
        self._promotions = Promotions(
            store,
            max_pinned_nbytes=store.arena.nbytes // 2,
            on_load=self.metrics.load,
            may_read=self.devices.may_read,
        )
        self.sessions = Sessions(
            store, self._promotions, self.devices, lease_ttl_s=lease_ttl_s, clock=clock
        )
        self._clock, self._started = clock, clock()
        self._verifying = threading.Lock()

    def usage(self) -> dict[str, dict[str, int]]:
        """Bytes held by tier and namespace (hex)."""
        return {
            tier: {space.hex(): nbytes for space, nbytes in spaces.items()}
            for tier, spaces in self.store.usage().items()
        }

    def gauges(self) -> dict[str, int]:
        """Sessions, leases and queues, as numbers."""
        return {
            **self.sessions.counts(),
            "promotions_waiting": self._promotions.num_waiting,
            "pinned_bytes": self._promotions.pinned_nbytes,
        }

    def table(self) -> Iterator[Metric]:
        """Metrics of decisions and devices."""
        return planning_metrics(self.decisions, self.devices.states())

    def status(self) -> dict[str, object]:
        """What `headstart node status` shows."""
        stats = self.store.stats()
        return {
            "schema": STATUS_SCHEMA,
            "pid": os.getpid(),
            "uptime_s": self._clock() - self._started,
            "gauges": self.gauges(),
            "tiers": {name: asdict(tier) for name, tier in stats.tiers.items()},
            "loads": {
                "num_loads": stats.num_loads,
                "num_late": stats.num_late,
                "num_writes_skipped": stats.num_writes_skipped,
                "queued_nbytes": stats.queued_nbytes,
            },
            "namespaces": self.usage(),
            "devices": {name: asdict(state) for name, state in self.devices.states().items()},
            "decisions": dict(self.decisions.num_by_reason),
        }

    def clear(self, namespace: str) -> str:
        """Forget all blocks, or those of the namespaces whose hex id starts so; a sentence.

        Raises ConfigError when no namespace does.
        """
        known = {space for spaces in self.store.usage().values() for space in spaces}
        chosen = [space for space in known if space.hex().startswith(namespace.lower())]
        if not chosen and namespace:
            raise ConfigError(
                f"no namespace starts with {namespace!r}; known: "
                + (", ".join(sorted(space.hex()[:16] for space in known)) or "none")
            )
        count = sum(self.store.discard_namespace(space) for space in chosen)
        return f"forgot {count} blocks of {len(chosen)} namespaces"

    def verify(self) -> dict[str, object]:
        """Read every block; a report a tier. One at a time: others are refused."""
        if not self._verifying.acquire(blocking=False):
            raise ConfigError("a verification is running already; wait for it")
        try:
            reports = self.store.verify()
        finally:
            self._verifying.release()
        return {
            "schema": "headstart.node.verify/1",
            "good": all(report.good for report in reports),
            "tiers": [asdict(report) for report in reports],
        }

    def close(self) -> None:
        """End the threads that read."""
        self.devices.close()
        self.learnt.save_aside(_SAVE_S)
        self._promotions.close()
