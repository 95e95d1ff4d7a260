"""Runs that AIPerf wrote: profile_export.jsonl, a record a request (`--export-level records`).

Looked at: AIPerf 0.1.1 and its main branch of 2026 (documentation of 0.14). A record has
`metadata`, `metrics` of a value and a unit each, and `error`. What a server tells of its cache is
`usage_prompt_cache_read_tokens`. When a request should have been sent is not told, so times count
from when it was; `credit_issued_ns` is when a worker was told to.

GenAI-Perf's profile_export.json, whose successor this is, has the raw answers and no counts of
tokens: GenAI-Perf counts them with a tokenizer. It is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headstart.bench.run import Request, Run
from headstart.errors import ConfigError

_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "sec": 1.0}
_NS = 1e-9
_MAX_NS = 2**63
_MAX_ERROR = 200


class _Metadata(msgspec.Struct):
    session_num: int
    request_start_ns: int
    request_end_ns: int
    x_correlation_id: str | None = None
    turn_index: int | None = None
    benchmark_phase: str = "profiling"


class _Value(msgspec.Struct):
    value: Any
    unit: str = ""


class _Error(msgspec.Struct):
    code: int | None = None
    type: str | None = None
    message: str = ""


class _Record(msgspec.Struct):
    metadata: _Metadata
    metrics: dict[str, _Value]
    error: _Error | None = None


def is_record(document: Any) -> bool:
    """Whether a document is a line of profile_export.jsonl."""
    return isinstance(document, dict) and {"metadata", "metrics"} <= document.keys()


def refuse(document: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError at what these tools write and what is not enough."""
    if {"metadata", "payload", "responses"} <= document.keys():
        raise ConfigError(f"{path} has raw answers; take AIPerf's profile_export.jsonl beside it")
    if {"service_kind", "experiments"} <= document.keys():
        raise ConfigError(
            f"{path}: GenAI-Perf's answers have no counts of tokens; use its successor AIPerf, and "
            "its profile_export.jsonl"
        )
    ttft = document.get("time_to_first_token")
    if isinstance(ttft, dict) and "avg" in ttft:
        raise ConfigError(
            f"{path} has averages only; take AIPerf's profile_export.jsonl beside it "
            "(--export-level records); GenAI-Perf has none"
        )


def run(documents: Sequence[Any], path: Path) -> Run:
    """The records of a run. Raises ConfigError."""
    records = []
    for number, document in enumerate(documents, start=1):
        try:
            record = msgspec.convert(document, _Record)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}, record {number}: {error}") from error
        if record.metadata.benchmark_phase != "warmup":
            records.append((f"{path}, record {number}", record))
    if not records:
        raise ConfigError(f"{path}: only requests of the warm-up are there")
    # They are written as they end; sessions are numbered as they start, the same in both arms.
    records.sort(key=lambda each: (each[1].metadata.session_num, each[1].metadata.turn_index or 0))
    for place, record in records:
        times = (record.metadata.request_start_ns, record.metadata.request_end_ns)
        if not all(0 <= time_ns <= _MAX_NS for time_ns in times):
            raise ConfigError(f"{place}: it began and ended at {times} ns")
    start_ns = min(record.metadata.request_start_ns for _, record in records)
    end_ns = max(record.metadata.request_end_ns for _, record in records)
    return Run(
        tool="aiperf",
        duration_s=(end_ns - start_ns) * _NS,
        requests=tuple(_request(record, place, start_ns) for place, record in records),
    )


def _request(record: _Record, place: str, start_ns: int) -> Request:
    metadata, metrics = record.metadata, record.metrics
    ttft_s = _time_s(metrics, "time_to_first_token", place)
    error = None
    if record.error is not None:
        error = f"{record.error.type or 'error'}: {record.error.message}"[:_MAX_ERROR]
    elif ttft_s is None:
        error = "no time of its first token: was AIPerf run with --streaming?"
    return Request(
        session=metadata.x_correlation_id or str(metadata.session_num),
        prompt_tokens=_count(metrics, "input_sequence_length", place)
        or _count(metrics, "error_isl", place)
        or 0,
        output_tokens=_count(metrics, "output_sequence_length", place) or 0,
        ttft_s=None if error else ttft_s,
        latency_s=None if error else _time_s(metrics, "request_latency", place),
        sent_s=(metadata.request_start_ns - start_ns) * _NS,
        cached_tokens=_count(metrics, "usage_prompt_cache_read_tokens", place),
        error=error,
    )


def _time_s(metrics: Mapping[str, _Value], name: str, place: str) -> float | None:
    found = metrics.get(name)
    if found is None:
        return None
    if not isinstance(found.value, int | float) or found.unit not in _SECONDS:
        raise ConfigError(f"{place}: {name} is {found.value!r} {found.unit!r}, no time")
    try:
        return float(found.value) * _SECONDS[found.unit]
    except OverflowError as error:
        raise ConfigError(f"{place}: {name} is no time: {error}") from error


def _count(metrics: Mapping[str, _Value], name: str, place: str) -> int | None:
    found = metrics.get(name)
    if found is None:
        return None
    if not isinstance(found.value, int):
        raise ConfigError(f"{place}: {name} is {found.value!r}, no whole number")
    return found.value
