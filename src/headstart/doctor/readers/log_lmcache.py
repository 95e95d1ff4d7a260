"""LMCache's log: what a request hits, what is loaded and stored, and how long it takes.

Its sizes are binary, however they are spelled. The rate that a line prints is not used: rates are
made of size and time, and the line that is furthest from its own is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from headstart.doctor.facts import Fact, Value
from headstart.doctor.readers.loglines import Place, Record, Spread, Sum, fact, source_of, tier

_REQUEST = b"Reqid: "
_RETRIEVED = b"Retrieved "
_STORED = b"Stored "
_NO_ROOM = b"Failed to allocate memory "
_TIMED_OUT = b"data transfer timeout"

_HITS = re.compile(
    rb"([^\s,]+), Total tokens (\d{1,15}), (?:Inference Engine computed tokens: (-?\d{1,15}), )?"
    rb"LMCache hit tokens: (\d{1,15}), need to load: (-?\d{1,15})"
)
_MOVED = re.compile(
    rb"(\d{1,15}) out of (?:total )?(\d{1,15})[^.]*tokens[^.]*\. size: (\d{1,15}(?:\.\d+)?) ?"
    rb"([kKMGTgmt]?i?[bB]), cost:? (\d{1,15}(?:\.\d+)?) (ms|s), throughput: (\d{1,15}(?:\.\d+)?) ?"
    rb"([kKMGTgmt]?i?[bB])/s"
)
_RANK = re.compile(rb"(?:rank[ =:]|TP)(\d+)")
_UNITS = {b"": 1.0, b"k": 2.0**10, b"m": 2.0**20, b"g": 2.0**30, b"t": 2.0**40}
_LEAST_NBYTES = 1 << 20
"""Below that, a size with four digits after the point of a GiB says nothing of a rate."""
_RECENT = 4096
_TAIL = 100


class LmcacheLog:
    """See the module."""

    marks = (_REQUEST, _RETRIEVED, _STORED, _NO_ROOM, _TIMED_OUT)
    settings = ()

    def __init__(self) -> None:
        self._total, self._found = Sum(), Sum()
        self._loads, self._local = Sum(), Sum()
        self._recent: dict[bytes, None] = {}
        self._required, self._delivered = Sum(), Sum()
        self._seconds, self._nbytes = Spread(), Sum()
        self._by_rank: dict[bytes, list[float]] = {}
        self._written, self._no_room, self._timeouts = Sum(), Sum(), Sum()
        self._worst: tuple[float, Place, float, float, float] | None = None

    def take(self, record: Record) -> bool:
        """See `Parser`. The words of the marks are common: what does not fit is of others."""
        if record.mark == _REQUEST:
            return self._request(record)
        if record.mark in (_RETRIEVED, _STORED):
            self._moved(record)
        elif record.mark == _TIMED_OUT:
            self._timeouts.add(1, record)
        else:
            self._no_room.add(1, record)
        return True

    def _request(self, record: Record) -> bool:
        match = record.match(_HITS)
        if match is None:
            return record.has(b"hit tokens: None")  # asked again later
        name, total, hit, need = match[1], float(match[2]), float(match[4]), float(match[5])
        if name in self._recent:
            return True  # a request that waits is looked up again and again, by each rank
        self._recent[name] = None
        if len(self._recent) > _RECENT:
            del self._recent[next(iter(self._recent))]
        # Negative: the engine itself holds more than LMCache does.
        local = float(match[3]) if match[3] else hit - need
        self._total.add(total, record)
        self._found.add(hit, record)
        self._loads.add(max(0.0, need), record)
        self._local.add(min(total, max(0.0, local)), record)
        return True

    def _moved(self, record: Record) -> None:
        match = record.match(_MOVED)
        if match is None:
            return
        tokens, required = float(match[1]), float(match[2])
        nbytes = float(match[3]) * _UNITS[match[4][:1].lower().replace(b"b", b"")]
        seconds = float(match[5]) * (1e-3 if match[6] == b"ms" else 1.0)
        printed = float(match[7]) * _UNITS[match[8][:1].lower().replace(b"b", b"")]
        if nbytes >= _LEAST_NBYTES and seconds and printed:
            rate = nbytes / seconds
            off = max(rate / printed, printed / rate)
            if self._worst is None or off > self._worst[0]:
                self._worst = (off, record.at, nbytes, seconds, printed)
        if record.mark == _STORED:
            self._written.add(nbytes, record)
            return
        self._required.add(required, record)
        self._delivered.add(tokens, record)
        self._seconds.add(seconds, record)
        self._nbytes.add(nbytes, record)
        rank = _RANK.search(record.block, record.start, record.place)
        sums = self._by_rank.setdefault(rank[1] if rank else b"", [0.0, 0.0, 0.0])
        for index, value in enumerate((nbytes, seconds, tokens)):
            sums[index] += value

    def facts(self) -> Iterator[Fact]:
        """See `Parser`."""
        yield from self._hits()
        if self._seconds.count:
            yield from self._load()
        if self._no_room.count:
            yield fact("num_alloc_failures", self._no_room.total, self._no_room.source)
        if self._timeouts.count:
            told: dict[str, Value] = {"num_timeouts": self._timeouts.total, "kind": "network"}
            yield from tier("mooncake", self._timeouts.source, told)
        yield from self._tier()
        if self._worst is not None:
            _, place, nbytes, seconds, printed = self._worst
            source = source_of(place)
            owner = str(source)
            figures: dict[str, Value] = {
                "name": "lmcache", "size": nbytes, "time": seconds, "printed": printed
            }  # fmt: skip
            for key, value in figures.items():
                yield Fact(key=key, value=value, source=source, scope="log_rates", owner=owner)

    def _hits(self) -> Iterator[Fact]:
        total, source = self._total.total, self._total.source
        if not total:
            return
        yield fact("connector", "lmcache", source)
        yield fact("num_requests", self._total.count, source)
        yield fact("prompt_tokens", self._total.mean, source)
        yield fact("found_tokens", self._found.mean, source)
        yield fact("load_tokens", self._loads.mean, source)
        local, loads = self._local.total, self._loads.total
        yield fact("local_hit_rate", local / total, source)
        yield fact("hit_rate", min(1.0, (local + loads) / total), source)
        if total > local:
            yield fact("external_hit_rate", min(1.0, loads / (total - local)), source)

    def _load(self) -> Iterator[Fact]:
        source = self._seconds.source
        # Over all requests, as what they hit is: those that load nothing have no line.
        loads, requests = self._seconds.count / len(self._by_rank), self._total.count
        part = min(1.0, loads / requests) if requests else 1.0
        yield fact("load", self._seconds.quantile(0.5) * part, source)
        if self._seconds.count >= _TAIL:
            yield fact("load_p99", self._seconds.quantile(0.99), source)
        each = sum(nbytes / tokens for nbytes, _, tokens in self._by_rank.values() if tokens)
        if each:
            yield fact("kv_bytes_per_token", each, source)

    def _tier(self) -> Iterator[Fact]:
        told: dict[str, Value] = {}
        if self._seconds.count:
            # Each rank loads its part at the same time.
            rates = [nbytes / time for nbytes, time, _ in self._by_rank.values() if nbytes and time]
            if rates:
                told["bandwidth"] = sum(rates)
            told["found"], told["delivered"] = self._required.mean, self._delivered.mean
        if self._written.count or self._nbytes.count:
            told["read"], told["written"] = self._nbytes.total, self._written.total
            source = (self._nbytes if self._nbytes.count else self._written).source
            yield from tier("lmcache", source, told)
