"""SGLang's log: prefill and decode batches, retractions, request times, HiCache's prefetches.

Three generations of lines; fields are found by their names, whatever stands between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from headstart.doctor.facts import Fact, Value
from headstart.doctor.readers.loglines import Flow, Record, Spread, Sum, fact, tier, trend, workers

_PREFILL = b"Prefill batch"
_DECODE = b"Decode batch"
_RETRACTED = b"KV cache pool is full. Retract requests"
_TIMES = b"Stats(rid="
_PREFETCH = b"refetch"
_POOL = b"max_total_num_tokens="

_MANY, _STRIDE = 200_000, 8
"""Decode batches from which every eighth says enough: nothing is counted in them."""
_TAG_NBYTES = 32
"""Of what stands right before a record: the rank is there."""
_RANK = re.compile(rb"\b(DP|TP|PP)(\d+)\b")
_PAIR = re.compile(rb"([\w ]+?)=(\d{1,15}(?:\.\d+)?)")
_FOUND = re.compile(rb"ing (\d{1,15}) pages for ")
_CAME = re.compile(rb" \S+ completed with (\d{1,15}) tokens| success .*?loaded=(\d{1,15})")
_NOT_READ = b" failed to retrieve page "
_COUNT = re.compile(rb"#retracted_reqs: (\d{1,15})")


class SglangLog:
    """See the module."""

    marks = (_PREFILL, _DECODE, _RETRACTED, _TIMES, _PREFETCH)
    settings = (_POOL,)

    def __init__(self) -> None:
        self._flows: dict[str, Flow] = {}
        self._speaker: dict[str, tuple[int, int]] = {}
        self._num_decodes = 0
        self._new, self._cached = Sum(), Sum()
        self._rates: dict[str, Spread] = {}
        self._throughput, self._retracted = Sum(), Sum()
        self._times: dict[str, Spread] = {}
        self._found, self._delivered, self._not_read = Sum(), Sum(), Sum()
        self._single: dict[str, Fact] = {}

    def take(self, record: Record) -> bool:
        """See `Parser`."""
        if record.mark == _DECODE:
            self._num_decodes += 1
            if self._num_decodes > _MANY and self._num_decodes % _STRIDE:
                return True
        if record.mark in (_PREFILL, _DECODE):
            return self._batch(record)
        if record.mark == _RETRACTED:
            count = _COUNT.search(record.text)
            self._retracted.add(float(count[1]) if count else 1.0, record)
            return True
        if record.mark == _TIMES:
            return self._request(record)
        if record.mark == _POOL:
            return self._pool(record)
        self._prefetch(record)
        return True

    def _batch(self, record: Record) -> bool:
        running = record.number(b"#running-req: ")
        if running is None:
            return False
        ranks = {kind: int(number) for kind, number in _RANK.findall(record.before[-_TAG_NBYTES:])}
        name = f"dp {ranks[b'DP']}" if b"DP" in ranks else ""
        # The ranks of one engine say the same: the first speaks. With attention that is data
        # parallel it need not be TP0.
        rank = ranks.get(b"PP", 0), ranks.get(b"TP", 0)
        if rank != self._speaker.setdefault(name, rank):
            return True
        usage = record.number(b"token usage: ")
        waiting = record.number(b"#queue-req: ") or 0.0
        self._flows.setdefault(name, Flow()).add(running, waiting, usage, record)
        if record.mark == _DECODE:
            rate = record.number(b"gen throughput (token/s): ")
            if rate is not None:
                self._throughput.add(rate, record)
            return True
        new, cached = record.number(b"#new-token: "), record.number(b"#cached-token: ")
        if new is not None and cached is not None and new + cached:
            self._new.add(new, record)
            self._cached.add(cached, record)
            self._rates.setdefault(name, Spread()).add(cached / (new + cached), record)
        return True

    def _request(self, record: Record) -> bool:
        told = {name.strip(): float(value) for name, value in _PAIR.findall(record.text)}
        for key, names, factor in (
            ("queue", (b"queue_duration",), 1e-3),
            ("prompt_tokens", (b"input_len", b"input len"), 1.0),
            ("cached_tokens", (b"cached_input_len", b"cached input len"), 1.0),
            ("output_tokens", (b"output_len", b"output len"), 1.0),
        ):
            value = next((told[name] for name in names if name in told), None)
            if value is not None:
                self._times.setdefault(key, Spread()).add(value * factor, record)
        return bool(told)

    def _pool(self, record: Record) -> bool:
        told = dict(_PAIR.findall(_POOL + record.text))
        for name, key in (
            (b"max_total_num_tokens", "pool_tokens"),
            (b" max_running_requests", "max_num_seqs"),
            (b" context_len", "max_model_len"),
        ):
            if name in told:
                self._single[key] = fact(key, float(told[name]), record.source)
        return bool(told)

    def _prefetch(self, record: Record) -> None:
        found, came = _FOUND.match(record.text), _CAME.match(record.text)
        if found:
            self._found.add(float(found[1]), record)
        elif came:
            self._delivered.add(float(came[1] or came[2]), record)
        elif _NOT_READ in record.text:
            self._not_read.add(1, record)

    def facts(self) -> Iterator[Fact]:
        """See `Parser`."""
        if self._flows:
            name, busiest = max(self._flows.items(), key=lambda each: each[1].typical_waiting)
            yield fact("engine", "sglang", busiest.source)
            yield from busiest.facts()
            yield from trend(self._rates.get(name, Spread()), busiest)
        yield from self._single.values()
        if self._cached.count:
            asked = self._cached.total + self._new.total
            yield fact("hit_rate", self._cached.total / asked, self._cached.source)
            yield fact("num_queries", asked, self._cached.source)
            yield fact("num_hits", self._cached.total, self._cached.source)
        for key, sums in self._times.items():
            value = sums.quantile(0.5) if key == "queue" else sums.mean
            yield fact(key, value, sums.source)
        if "queue" in self._times:
            yield fact("num_requests", self._times["queue"].count, self._times["queue"].source)
        if self._throughput.count:
            yield fact("throughput", self._throughput.mean, self._throughput.source)
        if self._retracted.count:
            yield fact("num_preemptions", self._retracted.total, self._retracted.source)
        yield from workers(self._flows, {})
        told: dict[str, Value] = {}
        if self._delivered.count:
            told["delivered"] = self._delivered.mean
        if self._not_read.count:
            told["num_failed_reads"] = self._not_read.total
            if self._found.count:
                told["num_found"] = self._found.total
        if told:
            source = (self._not_read if self._not_read.count else self._delivered).source
            yield from tier("hicache storage", source, told)
