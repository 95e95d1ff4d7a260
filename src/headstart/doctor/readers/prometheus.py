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
from headstart.doctor.readers.families import facts, load_of


class PrometheusReader:
    """See the module."""

    name = "metrics in Prometheus' text format"

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
        # What is at one server only, such as a queue, is of the one with most requests.
        busiest = sorted(servers.values(), key=_num_requests, reverse=True)
        found = [fact for metrics in busiest for fact in facts(metrics)]
        return Report(facts=(*found, *_workers(servers)), skipped=tuple(skipped))


def _num_requests(metrics: Metrics) -> float:
    load = load_of(metrics)
    return sum(load[key][0] for key in ("running", "waiting") if key in load)


def _workers(servers: Mapping[str, Metrics]) -> Iterator[Fact]:
    """Each engine behind a port, and each server, where there are several."""
    found: dict[str, dict[str, tuple[float, Source]]] = {}
    for origin, metrics in servers.items():
        engines = metrics.values_of("vllm:num_requests_running", "engine")
        for engine in engines if len(engines) > 1 else (None,):
            name = " ".join(filter(None, (origin, engine and f"engine {engine}")))
            found[name] = load_of(metrics, engine)
    found = {name: load for name, load in found.items() if "running" in load}
    if len(found) < 2:
        return
    for name, load in found.items():
        told: dict[str, tuple[Value, Source]] = {"name": (name, load["running"][1]), **load}
        for key, (value, source) in told.items():
            yield Fact(key=key, value=value, source=source, scope="workers", owner=name)
