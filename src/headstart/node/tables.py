"""Metrics of what was decided and of the tiers' devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headstart.node.decisions import DecisionLog
from headstart.node.devices import DeviceState


def planning_metrics(
    decisions: DecisionLog, devices: Mapping[str, DeviceState]
) -> Iterator[Metric]:
    """One family after the other."""
    by_reason = CounterMetricFamily(
        "headstart_decisions", "Requests by the reason of what was loaded.", labels=("reason",)
    )
    for reason, count in decisions.num_by_reason.items():
        by_reason.add_metric((reason,), count)
    yield by_reason
    # A sum of gains and losses may fall, which a counter must not.
    yield GaugeMetricFamily(
        "headstart_saved_seconds",
        "Time to the first token saved against computing everything, by the engines' models.",
        value=decisions.saved_s,
    )
    yield CounterMetricFamily(
        "headstart_regret_seconds",
        "Time to the first token lost against the best choice in hindsight.",
        value=decisions.regret_s,
    )
    yield CounterMetricFamily(
        "headstart_deadline_missed",
        "Requests that stopped waiting before all that was planned had come.",
        value=decisions.num_late,
    )
    is_open = GaugeMetricFamily(
        "headstart_breaker_open", "1 while no request reads the tier.", labels=("tier",)
    )
    opened = CounterMetricFamily(
        "headstart_breaker_opened", "Times that a tier's breaker opened.", labels=("tier",)
    )
    rates = GaugeMetricFamily(
        "headstart_device_bytes_per_second", "What a read is expected to get.", labels=("tier",)
    )
    for tier, state in devices.items():
        is_open.add_metric((tier,), state.breaker != "closed")
        opened.add_metric((tier,), state.num_opened)
        rates.add_metric((tier,), state.bytes_per_s)
    yield is_open
    yield opened
    yield rates
