"""Metrics of vLLM in Prometheus' text format, as `curl http://HOST:8000/metrics` gives them.

Counters and histograms grow since the start of the server, so two snapshots tell about the time
between them: with several files it is the last less the first; with one, everything since the
start. Times are means, so that stages and the whole add up. Engines behind one port are added.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headstart.doctor.facts import Fact, Source, Value
from headstart.doctor.readers.base import Document, Report

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?\s*")
_KNOWN = re.compile(r"^vllm:\w+(\{|\s)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PREFIX = "vllm:"
_MEANS = {
    "ttft_mean": "time_to_first_token_seconds",
    "queue": "request_queue_time_seconds",
    "prefill": "request_prefill_time_seconds",
    "tpot": "request_time_per_output_token_seconds",
    "prompt_tokens": "request_prompt_tokens",
    "output_tokens": "request_generation_tokens",
}
_QUANTILES = {"ttft_p90": 0.9, "ttft_p99": 0.99}


@dataclass(slots=True)
class _Snapshot:
    """One file: sums over labels, with the line of the last sample of each name."""

    path: str
    values: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    labels: dict[str, Mapping[str, str]] = field(default_factory=dict)


class PrometheusReader:
    """See the module."""

    name = "metrics of vLLM (Prometheus text)"

    def knows(self, document: Document) -> bool:
        """See `Reader`."""
        return _PREFIX in document.head and _KNOWN.search(document.head) is not None

    def read(self, documents: Sequence[Document]) -> Report:
        """See `Reader`."""
        skipped: list[str] = []
        snapshots = [_parse(document, skipped) for document in documents]
        last, first = snapshots[-1], snapshots[0] if len(snapshots) > 1 else None
        counts = {name: value for name, value in last.values.items() if _is_counter(name)}
        if first is not None:
            grown = {name: value - first.values.get(name, 0.0) for name, value in counts.items()}
            if min(grown.values(), default=0.0) < 0.0:
                skipped.append(f"{first.path}: from before a restart of the server; not used")
            else:
                counts = grown
        figures = dict(_figures(counts, last))
        peak = max((each.largest.get(_PREFIX + "kv_cache_usage_perc", -1.0)) for each in snapshots)
        if peak >= 0.0:
            figures["kv_usage"] = (peak, "kv_cache_usage_perc")
        facts = tuple(
            Fact(
                key=key,
                value=value,
                source=Source(path=last.path, line=last.lines.get(_PREFIX + name)),
            )
            for key, (value, name) in figures.items()
        )
        return Report(facts=facts, skipped=tuple(skipped))


def _is_counter(name: str) -> bool:
    return name.endswith(("_total", "_sum", "_count")) or "_bucket" in name


def _parse(document: Document, skipped: list[str]) -> _Snapshot:
    snapshot = _Snapshot(path=document.path)
    for number, line in enumerate(document.text.splitlines(), start=1):
        if not line.startswith(_PREFIX):
            continue
        match = _SAMPLE.fullmatch(line)
        try:
            value = float(match[3]) if match else None
        except ValueError:
            value = None
        if match is None or value is None or value != value:
            skipped.append(f"{document.path}:{number}: no sample")
            continue
        labels = dict(_LABEL.findall(match[2] or ""))
        name = match[1] + (f" {labels['le']}" if match[1].endswith("_bucket") else "")
        snapshot.values[name] = snapshot.values.get(name, 0.0) + value
        snapshot.largest[name] = max(snapshot.largest.get(name, value), value)
        snapshot.lines[name] = number
        snapshot.labels[name] = labels
    return snapshot


def _figures(
    counts: Mapping[str, float], last: _Snapshot
) -> Iterator[tuple[str, tuple[Value, str]]]:
    """Key, (value, name of the metric to cite)."""
    for key, name in _MEANS.items():
        total, number = (counts.get(f"{_PREFIX}{name}_{part}") for part in ("sum", "count"))
        if total is not None and number:
            yield key, (total / number, f"{name}_sum")
    for key, share in _QUANTILES.items():
        value = _quantile(counts, _MEANS["ttft_mean"], share)
        if value is not None:
            yield key, (value, f"{_MEANS['ttft_mean']}_sum")
    number = counts.get(f"{_PREFIX}time_to_first_token_seconds_count")
    if number:
        yield "num_requests", (number, "time_to_first_token_seconds_count")
    preempted = counts.get(_PREFIX + "num_preemptions_total")
    if preempted is not None:
        yield "num_preemptions", (preempted, "num_preemptions_total")
    yield from _hits(counts)
    for key in ("running", "waiting"):
        now = last.values.get(f"{_PREFIX}num_requests_{key}")
        if now is not None:
            yield key, (now, f"num_requests_{key}")
    labels = last.labels.get(_PREFIX + "cache_config_info", {})
    size, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
    if size.isdigit():
        yield "block_size", (float(size), "cache_config_info")
        if blocks.isdigit():
            yield "pool_tokens", (float(size) * float(blocks), "cache_config_info")


def _hits(counts: Mapping[str, float]) -> Iterator[tuple[str, tuple[Value, str]]]:
    """Hit rates in tokens. The external ones are of what the device did not hit."""
    asked = counts.get(_PREFIX + "prefix_cache_queries_total")
    hit = counts.get(_PREFIX + "prefix_cache_hits_total")
    if not asked or hit is None:
        return
    yield "num_queries", (asked, "prefix_cache_queries_total")
    yield "num_hits", (hit, "prefix_cache_hits_total")
    yield "local_hit_rate", (min(1.0, hit / asked), "prefix_cache_hits_total")
    beyond = counts.get(_PREFIX + "external_prefix_cache_queries_total")
    outside = counts.get(_PREFIX + "external_prefix_cache_hits_total", 0.0)
    if beyond:
        rate = min(1.0, outside / beyond)
        yield "external_hit_rate", (rate, "external_prefix_cache_hits_total")
    yield "hit_rate", (min(1.0, (hit + outside) / asked), "prefix_cache_hits_total")


def _quantile(counts: Mapping[str, float], name: str, share: float) -> float | None:
    """By linear interpolation inside its bucket; None beyond the last finite one."""
    start = f"{_PREFIX}{name}_bucket "
    buckets = sorted(
        (float(key[len(start) :]), n) for key, n in counts.items() if key.startswith(start)
    )
    if not buckets or not buckets[-1][1]:
        return None
    wanted, below, seen = share * buckets[-1][1], 0.0, 0.0
    for bound, number in buckets:
        if number >= wanted:
            if bound == float("inf"):
                return None
            return below + (bound - below) * (wanted - seen) / max(number - seen, 1.0)
        below, seen = bound, number
    return None
