"""Results of load generators: an arm for each run, named like its file.

Of `headstart bench serve`, `vllm bench serve --save-result` and SGLang's `bench_serving`. Where
every request was saved the figures are made from those, else its averages are taken. Whether a run
had the cache, most do not tell: an observations file says so, under the arm's name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headstart.bench.imports import parse_runs
from headstart.bench.run import SCHEMA, Run
from headstart.doctor.facts import Fact, Source, Value
from headstart.doctor.readers.base import Document, Report
from headstart.errors import ConfigError

_MARKS = (f'"{SCHEMA}"'.encode(), b'"ttfts"', b'"median_ttft_ms"')
_AVERAGES = {
    "mean_ttft_ms": ("ttft_mean", 1e-3),
    "median_ttft_ms": ("ttft_p50", 1e-3),
    "p90_ttft_ms": ("ttft_p90", 1e-3),
    "p95_ttft_ms": ("ttft_p95", 1e-3),
    "p99_ttft_ms": ("ttft_p99", 1e-3),
    "mean_tpot_ms": ("tpot", 1e-3),
    "duration": ("duration", 1.0),
    "completed": ("num_requests", 1.0),
    "max_concurrency": ("concurrency", 1.0),
    "output_throughput": ("throughput", 1.0),
    "request_throughput": ("request_throughput", 1.0),
}
_MIN, _MAX = 1e-9, 1e15
_LEAST = {0.9: 10, 0.99: 300}
"""Requests from which a quantile says something."""


class BenchReader:
    """See the module."""

    name = "results of load generators"
    is_live = False

    def knows(self, document: Document) -> bool:
        """See `Reader`."""
        return document.head.lstrip().startswith("{") and document.has(*_MARKS)

    def read(self, documents: Sequence[Document]) -> Report:
        """See `Reader`."""
        facts: list[Fact] = []
        skipped: list[str] = []
        for document in documents:
            try:
                runs = parse_runs(document.text, Path(document.path))
            except ConfigError as error:
                averages = _averages(document)
                facts += averages
                if not averages:
                    skipped.append(str(error))
                continue
            for number, run in enumerate(runs):
                name = run.arm or Path(document.path).stem
                name += f" {number + 1}" if len(runs) > 1 else ""
                facts += _facts(document, name, dict(_figures(run)))
        names = {fact.owner: fact.source for fact in facts}
        for name in names.keys() - {fact.owner for fact in facts if fact.key == "cache"}:
            skipped.append(
                f"{names[name]}: does not tell whether it had the cache; say so in an observations "
                f'file: [[arms]] name = "{name}" and cache = "off", "cold", "warm" or "on"'
            )
        return Report(facts=tuple(facts), skipped=tuple(skipped))


def _figures(run: Run) -> Iterator[tuple[str, Value]]:
    good = run.good
    times = [request.ttft_s for request in good if request.ttft_s is not None]
    yield "num_requests", float(len(good))
    yield "duration", run.duration_s
    yield "ttft_mean", sum(times) / len(times)
    yield "ttft_p50", run.ttft_s(0.5)
    for share, least in _LEAST.items():
        if len(times) >= least:
            yield f"ttft_p{round(100 * share)}", run.ttft_s(share)
    yield "prompt_tokens", sum(request.prompt_tokens for request in good) / len(good)
    yield "output_tokens", sum(request.output_tokens for request in good) / len(good)
    yield "throughput", run.output_tokens_per_s
    yield "request_throughput", len(good) / run.duration_s
    pace = run.pace or {}
    optional = {
        "tpot": run.tpot_s(0.5),
        "hit_rate": run.hit_rate,
        "shareable_share": run.simulated_hit_rate,
        "concurrency": pace.get("concurrency"),
        "requests_per_s": pace.get("rate"),
    }
    for key, value in optional.items():
        if value is not None:
            yield key, float(value)
    if run.has_prefix_cache is not None:
        yield "cache", "on" if run.has_prefix_cache else "off"


def _averages(document: Document) -> list[Fact]:
    """What a result without its requests tells; nothing if it is no such result."""
    try:
        tree = json.loads(document.text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(tree, dict):
        return []
    figures: dict[str, Value] = {}
    for name, (key, factor) in _AVERAGES.items():
        value: Any = tree.get(name)
        if (figure := _figure(value)) is not None:
            figures[key] = figure * factor
    total, count = _figure(tree.get("total_input_tokens")), _figure(tree.get("completed"))
    if total is not None and count is not None:
        figures["prompt_tokens"] = total / count
    return _facts(document, Path(document.path).stem, figures) if figures else []


def _figure(value: object) -> float | None:
    """The number, if it is one that somebody may have measured."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not _MIN < value < _MAX:
        return None
    return float(value)


def _facts(document: Document, name: str, figures: Mapping[str, Value]) -> list[Fact]:
    source = Source(path=document.path)
    told: dict[str, Value] = {"name": name, **figures}
    return [
        Fact(key=key, value=value, source=source, scope="arms", owner=name)
        for key, value in told.items()
    ]
