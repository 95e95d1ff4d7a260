"""SGLang's log: prefill and decode batches, retractions, request times, HiCache's prefetches.

Three generations of lines; fields are found by their names, whatever stands between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from headstart.doctor.facts import Fact, Value
from headstart.doctor.readers.loglines import (
    NUMBER,
    Flow,
    Record,
    Spread,
    Sum,
    fact,
    source_of,
    tier,
    trend,
    workers,
)

_PREFILL = b"Prefill batch"
_DECODE = b"Decode batch"
_RETRACTED = b"KV cache pool is full. Retract requests"
_TIMES = b"Stats(rid="
_PREFETCH = b"refetch"
_POOL = b"max_total_num_tokens="

_MANY, _STRIDE = 200_000, 8
"""Decode batches from which every eighth says enough: nothing is counted in them."""
_MOST_TAILS = 1000
_TAG_NBYTES = 32
"""Of what stands right before a record: the rank is there."""
_RANK = re.compile(rb"\b(DP|TP|PP)(\d+)\b")
_PAIR = re.compile(rb"([\w ]+?)=(\d{1,15}(?:\.\d+)?)")
_FOUND = re.compile(rb"ing (\d{1,15}) pages for ")
_CAME = re.compile(rb" \S+ completed with (\d{1,15}) tokens| success .*?loaded=(\d{1,15})")
_BATCH = rb"(?: \[\d+\])?[.,] "
_COMMON_DECODE = re.compile(
    rb"%(batch)b#running-req: %(n)b, #(?:full )?token: \d+, (?:full )?token usage: %(n)b"
    rb"[^#\n]*, gen throughput \(token/s\): %(n)b, #queue-req: %(n)b"
    % {b"n": NUMBER, b"batch": _BATCH}
)
_COMMON_PREFILL = re.compile(
    rb"%(batch)b#new-seq: \d+, #new-token: %(n)b, #cached-token: %(n)b"
    rb"(?:, cache hit rate: [\d.]+%%|, #token: \d+)?, (?:full )?token usage: %(n)b[^#\n]*, "
    rb"#running-req: %(n)b, #queue-req: %(n)b" % {b"n": NUMBER, b"batch": _BATCH}
)
_COMMON_TIMES = re.compile(
    rb"[\w-]+, input_len=%(n)b, cached_input_len=%(n)b, output_len=%(n)b[^\n]*?"
    rb"[ ,(]queue_duration=%(n)b" % {b"n": NUMBER}
)
"""How they are nearly always written; what does not fit is read field by field."""
_NOT_READ = b" failed to retrieve page "
_COUNT = re.compile(rb"#retracted_reqs: (\d{1,15})")


class SglangLog:
    """See the module."""

    marks = (_PREFILL, _DECODE, _RETRACTED, _TIMES, _PREFETCH)
    settings = (_POOL,)

    def __init__(self) -> None:
        self._flows: dict[str, Flow] = {}
        self._speaker: dict[str, tuple[int, int]] = {}
        self._engines: dict[bytes, tuple[str, bool]] = {}
        self._num_decodes = 0
        self._num_new, self._cached = 0.0, Sum()
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
            count = _COUNT.search(record.block, record.last, record.end)
            self._retracted.add(float(count[1]) if count else 1.0, record)
            return True
        if record.mark == _TIMES:
            return self._request(record)
        if record.mark == _POOL:
            return self._pool(record)
        self._prefetch(record)
        return True

    def _batch(self, record: Record) -> bool:
        """Of a batch, whatever the order of its fields; throughput of decodes, tokens of others."""
        new = cached = rate = None
        usage: float | None
        is_decode = record.mark == _DECODE
        common = record.match(_COMMON_DECODE if is_decode else _COMMON_PREFILL)
        if common is not None and is_decode:
            running, usage, rate, waiting = map(float, common.groups())
        elif common is not None:
            new, cached, usage, running, waiting = map(float, common.groups())
        else:
            told = record.number(b"#running-req: ")
            if told is None:
                return False
            running, usage = told, record.number(b"token usage: ")
            waiting = record.number(b"#queue-req: ") or 0.0
            if is_decode:
                rate = record.number(b"gen throughput (token/s): ")
            else:
                new, cached = record.number(b"#new-token: "), record.number(b"#cached-token: ")
        name, speaks = self._engine(record.tail(_TAG_NBYTES))
        if not speaks:
            return True
        flow = self._flows.get(name)
        if flow is None:
            flow = self._flows[name] = Flow()
        flow.add(running, waiting, usage, record)
        if rate is not None:
            self._throughput.add(rate, record)
        if new is not None and cached is not None and new + cached:
            self._num_new += new
            self._cached.add(cached, record)
            rates = self._rates.get(name)
            if rates is None:
                rates = self._rates[name] = Spread()
            rates.add(cached / (new + cached), record)
        return True

    def _engine(self, tail: bytes) -> tuple[str, bool]:
        """Its name, and whether this rank of it is listened to.

        The ranks of one engine say the same: the first that is met speaks. With attention that is
        data parallel it need not be TP0.
        """
        known = self._engines.get(tail)
        if known is None:
            ranks = {kind: int(number) for kind, number in _RANK.findall(tail)}
            name = f"dp {ranks[b'DP']}" if b"DP" in ranks else ""
            rank = ranks.get(b"PP", 0), ranks.get(b"TP", 0)
            known = name, rank == self._speaker.setdefault(name, rank)
            if len(self._engines) >= _MOST_TAILS:  # there is a time in them
                self._engines.clear()
            self._engines[tail] = known
        return known

    def _request(self, record: Record) -> bool:
        common = record.match(_COMMON_TIMES)
        if common is not None and not (
            record.has(b"_len=", after=common.end(3))
            or record.has(b"queue_dur", after=common.end())
        ):
            prompt, cached, output, queue = common.groups()
            self._time("queue", float(queue) * 1e-3, record)
            self._time("prompt_tokens", float(prompt), record)
            self._time("cached_tokens", float(cached), record)
            self._time("output_tokens", float(output), record)
            return True
        told = {name.strip(): float(value) for name, value in _PAIR.findall(record.text)}
        for key, names, factor in (
            ("queue", (b"queue_duration",), 1e-3),
            ("prompt_tokens", (b"input_len", b"input len"), 1.0),
            ("cached_tokens", (b"cached_input_len", b"cached input len"), 1.0),
            ("output_tokens", (b"output_len", b"output len"), 1.0),
        ):
            value = next((told[name] for name in names if name in told), None)
            if value is not None:
                self._time(key, value * factor, record)
        return bool(told)

    def _time(self, key: str, value: float, record: Record) -> None:
        told = self._times.get(key)
        if told is None:
            told = self._times[key] = Spread()
        told.add(value, record)

    def _pool(self, record: Record) -> bool:
        told = dict(_PAIR.findall(_POOL + record.text))
        for name, key in (
            (b"max_total_num_tokens", "pool_tokens"),
            (b" max_running_requests", "max_num_seqs"),
            (b" context_len", "max_model_len"),
        ):
            if name in told:
                self._single[key] = fact(key, float(told[name]), source_of(record.at))
        return bool(told)

    def _prefetch(self, record: Record) -> None:
        found = record.match(_FOUND)
        if found:
            self._found.add(float(found[1]), record)
            return
        came = record.match(_CAME)
        if came:
            self._delivered.add(float(came[1] or came[2]), record)
        elif record.has(_NOT_READ):
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
            asked = self._cached.total + self._num_new
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
