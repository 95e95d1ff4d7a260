"""Headstart's numbers in vLLM's own log line and `/metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from headstart.engines.vllm.stats import COUNTERS, TIER_TOKENS

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ConnectorStats(KVConnectorStats):
    """Sums by name, see `stats.COUNTERS`."""

    def reset(self) -> None:
        """Start at zero."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another process, or another step, has counted."""
        for name, number in other.data.items():
            self.data[name] = self.data.get(name, 0) + number
        return self

    def reduce(self) -> dict[str, int | float]:
        """What a log line shows."""
        return {name: round(number, 4) for name, number in self.data.items() if number}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """The counters, one child an engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(f"headstart:{name}", text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._tokens = self._counter_cls(
            "headstart:loaded_tokens",
            "Tokens loaded instead of computed, by tier.",
            labelnames=[*labelnames, "tier"],
        )
        for counter in self._counters.values():
            for values in per_engine_labelvalues.values():
                counter.labels(*values)  # shown from the start, at zero

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add a step's sums."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, number in transfer_stats_data.items():
            if name.startswith(TIER_TOKENS):
                self._tokens.labels(*values, name.removeprefix(TIER_TOKENS)).inc(number)
            elif name in self._counters:
                self._counters[name].labels(*values).inc(number)
