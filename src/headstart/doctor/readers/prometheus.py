"""Metrics in Prometheus' text format, as `curl http://HOST:8000/metrics` gives them.

Of vLLM, SGLang, LMCache and Headstart. Counters and histograms grow since the start of the server,
so several snapshots of one tell about the time between the first and the last, and one about
everything since the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from headstart.doctor.facts import Fact, Source, Value
from headstart.doctor.readers.base import Document, Report
from headstart.doctor.readers.exposition import KNOWN, Metrics
from headstart.doctor.readers.families import RUNNING, facts, load_of


class PrometheusReader:
    """See the module."""

    name = "metrics in Prometheus' text format"
    is_live = True

    def knows(self, document: Document) -> bool:
        """See `Reader`."""
        return KNOWN.search(document.head) is not None

    def read(self, documents: Sequence[Document]) -> Report:
        """See `Reader`."""
        skipped: list[str] = []
        servers: dict[str, Metrics] = {}
        for origin in dict.fromkeys(document.origin for document in documents):
            snapshots = [each for each in documents if each.origin == origin]
            servers[origin] = Metrics(snapshots, skipped)
            if any(servers[origin].resets):
                skipped.append(
                    f"{snapshots[0].path}: from before a restart of the server, as counters fell; "
                    "what it counted after that was added"
                )
            if servers[origin].left_out:
                skipped.append(
                    f"{snapshots[0].path}: several models; all but the one with most requests are "
                    f"left out: {', '.join(sorted(servers[origin].left_out))}"
                )
        # Stages of one engine say nothing of another: the one with most requests speaks, with what
        # runs beside engines, such as a node or a cache server.
        busiest = sorted(servers.values(), key=_num_requests, reverse=True)
        engines = [metrics for metrics in busiest if _is_engine(metrics)]
        spoken = [metrics for metrics in busiest if metrics not in engines[1:]]
        found = [fact for metrics in spoken for fact in facts(metrics)]
        alike = {
            origin: metrics
            for origin, metrics in servers.items()
            if metrics.model == spoken[0].model
        }
        return Report(facts=(*found, *_workers(alike)), skipped=tuple(skipped))


def _is_engine(metrics: Metrics) -> bool:
    return any(metrics.engines(name) for name in RUNNING)


def _num_requests(metrics: Metrics) -> float:
    load = load_of(metrics)
    return sum(load[key][0] for key in ("running", "waiting") if key in load)


def _workers(servers: Mapping[str, Metrics]) -> Iterator[Fact]:
    """Each engine behind a port, and each server, where several have the same model."""
    found: dict[str, dict[str, tuple[float, Source]]] = {}
    for origin, metrics in servers.items():
        engines = [who for name in RUNNING for who in metrics.engines(name)]
        common = set.intersection(*(set(who.items()) for who in engines)) if engines else set()
        for who in engines or [{}]:
            differs = [f"{key.lower()} {who[key]}" for key in who if (key, who[key]) not in common]
            found[" ".join(filter(None, (origin, *differs)))] = load_of(metrics, **who)
    found = {name: load for name, load in found.items() if "running" in load}
    if len(found) < 2:
        return
    for name, load in found.items():
        told: dict[str, tuple[Value, Source]] = {"name": (name, load["running"][1]), **load}
        for key, (value, source) in told.items():
            yield Fact(key=key, value=value, source=source, scope="workers", owner=name)
