"""Runs that GuideLLM wrote (`--output kind=json`, or `--output-path x.json` before 0.7).

Looked at: the schemas of 0.4.0 (no metadata), 0.5.0 and 0.6.1 (report version 1), 0.7.3 and the
main branch of August 2026 (report version 2; only the last tells `cached_tokens`). A report has a
list of benchmarks, each a run of its own, with its requests as `successful`, `errored` and
`incomplete`.

GuideLLM keeps a sample of the requests where it is told to, and 0.4 and 0.5 by default; that says
nothing of the others, and is refused. Requests outside the measured window (warm-up, cool-down) are
left out, as in GuideLLM's own metrics. What was cut off at the end of the window has failed: to
drop the slowest ones would flatter the server.

In an open loop (constant, poisson, trace) times count from `targeted_start`, as everywhere here,
and not, as GuideLLM prints them, from when the request was sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headstart.bench.run import Request, Run
from headstart.errors import ConfigError

_VERSIONS = (1, 2)
_OPEN = ("constant", "poisson", "trace")
_CUT_OFF = "not finished when the benchmark ended; limit it by requests, not by seconds"
_MAX_ERROR = 200


class _Timings(msgspec.Struct):
    targeted_start: float | None = None
    queued: float | None = None
    request_start: float | None = None
    first_token_iteration: float | None = None
    last_token_iteration: float | None = None


class _Info(msgspec.Struct):
    timings: _Timings
    conversation_id: str | None = None
    error: str | None = None


class _Usage(msgspec.Struct):
    cached_tokens: int | None = None


class _Entry(msgspec.Struct):
    info: _Info
    request_id: str = ""
    request_start_time: float | None = None
    request_end_time: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    output: str | None = None
    input_metrics: _Usage = msgspec.field(default_factory=_Usage)


class _Entries(msgspec.Struct):
    successful: list[_Entry] | None = None
    errored: list[_Entry] | None = None
    incomplete: list[_Entry] | None = None


class _Totals(msgspec.Struct):
    successful: int | None = None
    errored: int | None = None
    incomplete: int | None = None


class _Metrics(msgspec.Struct):
    request_totals: _Totals


class _Strategy(msgspec.Struct):
    type_: str = ""
    rate: float | None = None
    streams: int | None = None
    max_concurrency: int | None = None
    time_scale: float | None = None


class _Config(msgspec.Struct):
    strategy: _Strategy


class _Benchmark(msgspec.Struct):
    config: _Config
    metrics: _Metrics
    requests: _Entries
    start_time: float
    end_time: float


def is_report(document: Mapping[str, Any]) -> bool:
    """Whether a document is a report of GuideLLM."""
    return isinstance(document.get("benchmarks"), list)


def runs(document: Mapping[str, Any], path: Path) -> list[Run]:
    """The benchmarks of a report. Raises ConfigError."""
    metadata = document.get("metadata")
    version = metadata.get("version", 1) if isinstance(metadata, dict) else 1
    if version not in _VERSIONS:
        raise ConfigError(
            f"{path}: a report of GuideLLM of version {version!r}; known: {_VERSIONS}"
        )
    found = []
    for number, each in enumerate(document["benchmarks"], start=1):
        if isinstance(each, dict) and "request_loader" in each:
            raise ConfigError(f"{path}: a report of GuideLLM before 0.4; use a later one")
        try:
            benchmark = msgspec.convert(each, _Benchmark)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}, benchmark {number}: {error}") from error
        found.append(_run(benchmark, f"{path}, benchmark {number}"))
    if not found:
        raise ConfigError(f"{path}: a report of GuideLLM without benchmarks")
    return found


def _run(benchmark: _Benchmark, place: str) -> Run:
    strategy = benchmark.config.strategy
    entries: list[tuple[_Entry, str | None]] = []
    for kind in ("successful", "errored", "incomplete"):
        mine = [e for e in getattr(benchmark.requests, kind) or () if _is_inside(e, benchmark)]
        total = getattr(benchmark.metrics.request_totals, kind) or 0
        if len(mine) < total:
            raise ConfigError(
                f"{place} has {len(mine)} of {total} {kind} requests; let GuideLLM keep them all: "
                "without sample_size (from 0.7), with --sample-requests at their number (before)"
            )
        entries += [(each, _error(each, kind)) for each in mine]
    # The order in which they were queued is that of the data, and so the same in both arms.
    entries.sort(key=lambda each: each[0].info.timings.queued or 0.0)
    is_open = strategy.type_ in _OPEN
    return Run(
        tool="guidellm",
        duration_s=benchmark.end_time - benchmark.start_time,
        requests=tuple(
            _request(each, error, benchmark.start_time, is_open) for each, error in entries
        ),
        pace=dict(_pace(strategy)),
    )


def _is_inside(entry: _Entry, benchmark: _Benchmark) -> bool:
    ended = entry.request_end_time
    if ended is None:
        return True
    started = ended if entry.request_start_time is None else entry.request_start_time
    return ended >= benchmark.start_time and started <= benchmark.end_time


def _error(entry: _Entry, kind: str) -> str | None:
    if kind == "incomplete":
        return _CUT_OFF
    if kind == "errored":
        return (entry.info.error or "failed")[:_MAX_ERROR]
    if entry.info.timings.first_token_iteration is None:
        return "no time of its first token: was it streamed?"
    return None


def _request(entry: _Entry, error: str | None, start_s: float, is_open: bool) -> Request:
    timings = entry.info.timings
    sent = timings.request_start
    intended = timings.targeted_start if is_open else None
    since = sent if intended is None else intended
    first, last = timings.first_token_iteration, timings.last_token_iteration
    is_timed = error is None and since is not None
    return Request(
        session=entry.info.conversation_id or entry.request_id,
        prompt_tokens=entry.prompt_tokens or 0,
        output_tokens=entry.output_tokens or 0,
        ttft_s=first - since if is_timed and first is not None and since is not None else None,
        latency_s=last - since if is_timed and last is not None and since is not None else None,
        intended_s=None if intended is None else intended - start_s,
        sent_s=None if sent is None else sent - start_s,
        cached_tokens=entry.input_metrics.cached_tokens,
        output=entry.output,
        error=error,
    )


def _pace(strategy: _Strategy) -> Iterator[tuple[str, float | None]]:
    yield "rate", strategy.rate
    at_once = 1 if strategy.type_ == "synchronous" else strategy.streams
    yield "concurrency", strategy.max_concurrency if at_once is None else at_once
    if strategy.type_ == "trace":
        yield "trace_time", 1.0
        yield "time_scale", strategy.time_scale
