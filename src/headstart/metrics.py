"""The metric table of a node, in Prometheus' terms.

What the store counts is read when it is asked for; only latencies are observed as they happen.
Names follow Prometheus' conventions: base units, `_total` for counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headstart.store import StoreStats

if TYPE_CHECKING:
    from headstart.lease import Lease
    from headstart.types import TierStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LOOKUP_BUCKETS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5)
_LOAD_BUCKETS = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

# name, help, field of TierStats
_TIER_COUNTERS = (
    ("headstart_tier_hits", "Blocks served by the tier.", "num_hits"),
    ("headstart_tier_misses", "Blocks asked for that the tier did not serve.", "num_misses"),
    ("headstart_tier_stored", "Blocks stored.", "num_stored"),
    ("headstart_tier_evicted", "Blocks evicted to make room.", "num_evicted"),
    ("headstart_tier_discarded", "Blocks forgotten because somebody asked.", "num_discarded"),
    ("headstart_tier_dropped", "Blocks found damaged, with those below them.", "num_dropped"),
    ("headstart_tier_refused", "Blocks refused: no room, or no parent.", "num_refused"),
    ("headstart_tier_failed", "Operations that the medium failed.", "num_failed"),
    ("headstart_tier_read_bytes", "Bytes read from the tier.", "read_nbytes"),
    ("headstart_tier_written_bytes", "Bytes written to the tier.", "written_nbytes"),
)
_TIER_GAUGES = (
    ("headstart_tier_blocks", "Blocks held.", "num_blocks"),
    ("headstart_tier_used_bytes", "Bytes in use.", "used_nbytes"),
    ("headstart_tier_capacity_bytes", "Bytes that the tier may use.", "capacity_nbytes"),
)
_STORE_COUNTERS = (
    ("headstart_loads", "Loads of a prompt's prefix.", "num_loads"),
    ("headstart_loads_late", "Loads that were cut short and gave what was ready.", "num_late"),
    (
        "headstart_writes_skipped",
        "Blocks not written to a lower tier because its queue was full.",
        "num_writes_skipped",
    ),
)


class Metrics:
    """Everything a node tells. Thread-safe."""

    def __init__(
        self,
        stats: Callable[[], StoreStats],
        usage: Callable[[], dict[str, dict[str, int]]],
        gauges: Callable[[], dict[str, int]],
        more: Callable[[], Iterable[Metric]] = tuple,
    ) -> None:
        """`usage` gives bytes by tier and namespace, `gauges` more numbers by their short names.

        `more` gives what else there is to tell.
        """
        self._stats, self._usage, self._gauges, self._more = stats, usage, gauges, more
        self._registry = CollectorRegistry()
        self._lookup = Histogram(
            "headstart_lookup_seconds",
            "Time to look up a prompt and start its promotion.",
            buckets=_LOOKUP_BUCKETS,
            registry=self._registry,
        )
        self._load = Histogram(
            "headstart_load_seconds",
            "Time to bring a prompt's prefix into memory, by the slowest tier it came from.",
            ("tier",),
            buckets=_LOAD_BUCKETS,
            registry=self._registry,
        )
        self._registry.register(_Table(self))

    def lookup(self, seconds: float) -> None:
        """A prompt was looked up."""
        self._lookup.observe(seconds)

    def load(self, lease: Lease) -> None:
        """A prefix was brought into memory."""
        served = [tier for tier, count in lease.by_tier.items() if count]
        if served:
            self._load.labels(served[-1]).observe(lease.seconds)

    def text(self) -> bytes:
        """The table in Prometheus' text format."""
        return generate_latest(self._registry)


class _Table(Collector):
    """Reads the store's own counters when it is asked."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []  # nothing is read when the table is registered

    def collect(self) -> Iterator[Metric]:
        stats = self._metrics._stats()
        yield from _by_tier(CounterMetricFamily, _TIER_COUNTERS, stats.tiers)
        yield from _by_tier(GaugeMetricFamily, _TIER_GAUGES, stats.tiers)
        damage = CounterMetricFamily(
            "headstart_tier_damage", "Blocks found damaged.", labels=("tier", "cause")
        )
        for tier, each in stats.tiers.items():
            for cause, count in each.damage.items():
                damage.add_metric((tier, cause), count)
        yield damage
        for name, text, field in _STORE_COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(stats, field))
        yield GaugeMetricFamily(
            "headstart_write_queue_bytes",
            "Bytes accepted and not yet written to lower tiers.",
            value=stats.queued_nbytes,
        )
        held = GaugeMetricFamily(
            "headstart_namespace_bytes", "Bytes held.", labels=("tier", "namespace")
        )
        for tier, spaces in self._metrics._usage().items():
            for space, nbytes in spaces.items():
                held.add_metric((tier, space), nbytes)
        yield held
        for name, value in self._metrics._gauges().items():
            yield GaugeMetricFamily(f"headstart_{name}", f"Number of {name}.", value=value)
        yield from self._metrics._more()


def _by_tier(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily],
    table: tuple[tuple[str, str, str], ...],
    tiers: dict[str, TierStats],
) -> Iterator[Metric]:
    for name, text, field in table:
        metric = family(name, text, labels=("tier",))
        for tier, stats in tiers.items():
            metric.add_metric((tier,), getattr(stats, field))
        yield metric
