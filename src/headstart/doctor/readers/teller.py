"""Facts of metrics: means, growths and gauges, each cited where its metric stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headstart.doctor.facts import Fact, Value
from headstart.doctor.readers.exposition import Metrics
from headstart.doctor.vocabulary import TOP

_QUANTILES = {"ttft_p90": 0.9, "ttft_p99": 0.99}
"""Without the median: stages are means, and would not add up to it."""
_LEAST = {"ttft_p90": 30, "ttft_p99": 300}
"""Requests from which a quantile says something."""


@dataclass(frozen=True, slots=True)
class Teller:
    """Makes facts of metrics, cited where the metric stands."""

    metrics: Metrics

    def first(self, *names: str) -> str:
        """The first of several names that is exposed; the last if none is."""
        return next((name for name in names if name in self.metrics), names[-1])

    def one(
        self, key: str, value: Value | None, name: str, scope: str = TOP, owner: str = ""
    ) -> Iterator[Fact]:
        """A fact, if there is a value; `name` is the metric to cite."""
        if value is not None:
            source = self.metrics.source(name)
            yield Fact(key=key, value=value, source=source, scope=scope, owner=owner)

    def mean(self, key: str, *names: str, factor: float = 1.0, **labels: str) -> Iterator[Fact]:
        """The mean of a histogram."""
        for name in names:
            value = self.metrics.mean(name, **labels)
            if value is not None:
                yield from self.one(key, value * factor, f"{name}_sum")
                return

    def growth(self, key: str, *names: str) -> Iterator[Fact]:
        """What a counter grew by."""
        name = self.first(*names)
        yield from self.one(key, self.metrics.growth(name), name)

    def now(self, key: str, name: str, **labels: str) -> Iterator[Fact]:
        """The last value of a gauge."""
        yield from self.one(key, self.metrics.now(name, **labels), name)

    def per_request(self, key: str, name: str, every: str) -> Iterator[Fact]:
        """The mean of a histogram that not every request is in, over all requests.

        So that it adds up with `every`, a histogram that they all are in; where that is not told,
        over those that are in it. Each rank of each engine counts on its own.
        """
        metrics, count, of = self.metrics, f"{name}_count", f"{every}_count"
        mean, counted, asked = metrics.mean(name), metrics.growth(count), metrics.growth(of)
        if mean is None or not counted:
            return
        if asked:
            by_rank = counted / max(1, metrics.num_series(count))
            mean *= min(1.0, by_rank * max(1, len(metrics.engines(of))) / asked)
        yield from self.one(key, mean, f"{name}_sum")

    def largest(
        self, key: str, *names: str, busy: Sequence[str] = (), **labels: str
    ) -> Iterator[Fact]:
        """The largest value of a gauge of an engine; of any, where it is told of none alone."""
        name, metrics = self.first(*names), self.metrics
        if metrics.largest(name, **labels) is None:
            labels = {}
        yield from self.one(key, metrics.largest(name, busy=busy, **labels), name)

    def share(self, key: str, part: str, whole: str) -> Iterator[Fact]:
        """A counter by another one."""
        asked, hit = self.metrics.growth(whole), self.metrics.growth(part)
        if asked and hit is not None:
            yield from self.one(key, min(1.0, hit / asked), part)

    def first_token(self, name: str) -> Iterator[Fact]:
        """Mean, quantiles and number of a histogram of first tokens."""
        yield from self.mean("ttft_mean", name)
        count = self.metrics.growth(f"{name}_count")
        if not count:
            return
        yield from self.one("num_requests", count, f"{name}_count")
        for key, share in _QUANTILES.items():
            if count >= _LEAST[key]:
                yield from self.one(key, self.metrics.quantile(name, share), f"{name}_count")

    def tier(
        self, owner: str, kind: str = "", **figures: tuple[float | None, str]
    ) -> Iterator[Fact]:
        """A tier, if anything is told of it: keys with (value, name of the metric to cite)."""
        told = {key: (value, name) for key, (value, name) in figures.items() if value is not None}
        if not told:
            return
        last = next(reversed(told.values()))[1]
        yield from self.one("name", owner, last, "tiers", owner)
        if kind:
            yield from self.one("kind", kind, last, "tiers", owner)
        for key, (value, name) in told.items():
            yield from self.one(key, value, name, "tiers", owner)
