"""Finding the records of interest in a log, block by block, and what is summed over them.

A log is read at the speed of a byte search: only where one of a few marks stands is a line looked
at. Whatever a terminal, a container runtime or a shipper puts around a record (colours, times,
JSON) stays outside of it, and two records that run together on one line are two.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from headstart.doctor.facts import Fact, Source, Value
from headstart.doctor.readers.base import Document

_LONGEST = 4 << 20
"""Of a line without an end; what is longer is no log."""
_START_NBYTES = 16 << 20
_COLOUR = re.compile(rb"(?:\x1b|\\u001b|\\x1b)\[[0-9;]*[A-Za-z]")
_COLOURED = (b"\x1b", b"1b[")
"""What stands in every colour, and next to nowhere else: a byte is sought much faster."""
NUMBER = rb"(\d{1,15}(?:\.\d{1,15})?)"
"""Of a length that no nonsense becomes infinite."""
_NUMBER = re.compile(NUMBER)
_MOST = 1 << 20
"""Values that are kept for a median, or moments for a choice; those beyond are only summed."""

Place = tuple[str, int]
"""A file, and a line of it."""


class Record:
    """From a mark to the end of its line, or to the next mark on it.

    It moves along its log, and nothing is copied for it: keep figures of it, never itself.
    """

    __slots__ = ("block", "end", "last", "line", "mark", "path", "place", "start")

    def __init__(self, path: str) -> None:
        self.path = path
        self.block = self.mark = b""
        self.line = self.start = self.place = self.last = self.end = 0
        """Within the block: start <= place of the mark < last <= end."""

    @property
    def text(self) -> bytes:
        """What stands after the mark."""
        return self.block[self.last : self.end]

    @property
    def before(self) -> bytes:
        """What stands on the line before it, from the last mark on."""
        return self.block[self.start : self.place]

    @property
    def at(self) -> Place:
        """Where it stands."""
        return self.path, self.line

    def tail(self, nbytes: int) -> bytes:
        """The last bytes before it."""
        return self.block[max(self.start, self.place - nbytes) : self.place]

    def number(self, name: bytes) -> float | None:
        """What stands after the first `name`, such as `b"Running: "`; None if no number does."""
        place = self.block.find(name, self.last, self.end)
        match = _NUMBER.match(self.block, place + len(name), self.end) if place >= 0 else None
        return float(match[0]) if match else None

    def match(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """A pattern that the text starts with."""
        return pattern.match(self.block, self.last, self.end)

    def has(self, name: bytes, after: int = 0) -> bool:
        """Whether it is in the text, or in what follows a place of the block."""
        return self.block.find(name, after or self.last, self.end) >= 0


class Parser(Protocol):
    """Makes facts of the records of one program. For one thread."""

    @property
    def marks(self) -> Sequence[bytes]:
        """What its records start with."""
        ...

    @property
    def settings(self) -> Sequence[bytes]:
        """The same of records that an engine writes when it starts."""
        ...

    def take(self, record: Record) -> bool:
        """Add a record that starts with one of the marks; False if it is something else."""
        ...

    def facts(self) -> Iterator[Fact]:
        """What all of them tell."""
        ...


def scan(document: Document, marks: Sequence[bytes], settings: Sequence[bytes]) -> Iterator[Record]:
    """All records of a log, in order; those of a start only where a start is: in its first MiBs."""
    line, rest, nbytes = 1, b"", 0
    sought = (*marks, *settings)
    record = Record(document.path)
    for block in document.blocks():
        text = rest + block if rest else block
        nbytes += len(block)
        end = text.rfind(b"\n") + 1
        if not end and len(text) < _LONGEST:
            rest = text
            continue
        if nbytes > _START_NBYTES:
            sought = tuple(marks)
        whole, rest = (text[:end], text[end:]) if end else (text, b"")
        yield from _records(_plain(whole), sought, record, line)
        line += whole.count(b"\n")
    yield from _records(_plain(rest), sought, record, line)


def _records(text: bytes, marks: Sequence[bytes], record: Record, line: int) -> Iterator[Record]:
    places: list[int] = []
    marked: dict[int, bytes] = {}
    find = text.find
    for mark in marks:
        place, length = find(mark), len(mark)
        while place >= 0:
            places.append(place)
            marked[place] = mark
            place = find(mark, place + length)
    places.sort()
    places.append(len(text))
    seen = last = 0
    record.block = text
    for index, place in enumerate(places[:-1]):
        mark = marked[place]
        line += text.count(b"\n", seen, place)
        seen = place
        start = text.rfind(b"\n", last, place) + 1
        record.start = start if start > last else last
        record.place = place
        record.mark = mark
        record.last = last = place + len(mark)
        end = find(b"\n", last, places[index + 1])
        record.end = max(last, places[index + 1]) if end < 0 else end
        record.line = line
        yield record


def _plain(text: bytes) -> bytes:
    return _COLOUR.sub(b"", text) if any(each in text for each in _COLOURED) else text


class Sum:
    """Numbers of many records; cited by the last."""

    __slots__ = ("_line", "_path", "count", "total")

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0
        self._path, self._line = "", 0

    def add(self, value: float, record: Record) -> None:
        """One more."""
        self.total += value
        self.count += 1
        self._path, self._line = record.path, record.line

    @property
    def source(self) -> Source:
        """Of the last."""
        return Source(path=self._path, line=self._line or None)

    @property
    def mean(self) -> float:
        """Of at least one."""
        return self.total / self.count


class Spread(Sum):
    """A sum that keeps the numbers, the first million of them."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        super().__init__()
        self.values = array("d")

    def add(self, value: float, record: Record) -> None:
        """One more."""
        self.total += value
        self.count += 1
        self._path, self._line = record.path, record.line
        if self.count <= _MOST:
            self.values.append(value)

    def quantile(self, share: float) -> float:
        """Of at least one, without interpolation."""
        ordered = sorted(self.values)
        return ordered[int(share * (len(ordered) - 1))]


class Flow:
    """What one engine said about its load, line after line."""

    def __init__(self) -> None:
        self._moments = array("d")  # running, waiting, usage, line of each
        self._paths: list[tuple[int, str]] = []
        """Where in the moments another file begins."""
        self._fullest = -1.0
        self._where_fullest = self._where_last = ("", 0)
        self._running = self._waiting = 0.0
        self._num_lines = 0

    def add(self, running: float, waiting: float, usage: float | None, record: Record) -> None:
        """One line. Idle ones tell of no load."""
        self._num_lines += 1
        self._running += running
        self._waiting += waiting
        self._where_last = (record.path, record.line)
        if usage is not None and usage > self._fullest:
            self._fullest, self._where_fullest = usage, self._where_last
        if (running or waiting) and len(self._moments) < 4 * _MOST:
            if not self._paths or self._paths[-1][1] != record.path:
                self._paths.append((len(self._moments), record.path))
            self._moments.extend((running, waiting, -1.0 if usage is None else usage, record.line))

    @property
    def source(self) -> Source:
        """Of the last line."""
        return source_of(self._where_last)

    @property
    def means(self) -> tuple[float, float]:
        """Requests running and waiting, over at least one line."""
        return self._running / self._num_lines, self._waiting / self._num_lines

    @property
    def typical_waiting(self) -> float:
        """Requests that wait in the typical line of a queue; 0 if it hardly ever queues."""
        queued = self._queued()
        return self._moments[queued[len(queued) // 2] + 1] if queued else 0.0

    @property
    def is_full(self) -> bool:
        """Whether the KV cache is full in a tenth of the busy lines or more."""
        usages = sorted(self._moments[2::4])
        return bool(usages) and usages[int(0.9 * (len(usages) - 1))] >= _FULL

    def _queued(self) -> list[int]:
        """Places of the moments with a queue, the shortest first, if they are a fifth of all."""
        places = range(0, len(self._moments), 4)
        queued = [place for place in places if self._moments[place + 1] > 0]
        if 5 * len(queued) < len(places):
            return []
        return sorted(queued, key=lambda place: self._moments[place + 1])

    def facts(self) -> Iterator[Fact]:
        """Running, waiting and KV usage of one moment, so that they belong together.

        Of the lines with a queue the one with the median queue; where there is hardly any queue,
        the KV cache at its fullest.
        """
        queued = self._queued()
        if not queued:
            if self._fullest >= 0.0:
                source = source_of(self._where_fullest)
                yield fact("kv_usage", min(1.0, self._fullest), source)
            return
        place = queued[len(queued) // 2]
        running, waiting, usage, line = self._moments[place : place + 4]
        path = [path for start, path in self._paths if start <= place][-1]
        source = Source(path=path, line=int(line))
        yield fact("running", running, source)
        yield fact("waiting", waiting, source)
        if usage >= 0.0:
            yield fact("kv_usage", min(1.0, usage), source)


_FULL = 0.8
_ENOUGH = 20


def trend(rates: Spread, flow: Flow) -> Iterator[Fact]:
    """The hit rate of the first and of the last quarter of many busy lines.

    Only where the KV cache is full: elsewhere a hit rate that changes says that the load did.
    """
    count = len(rates.values)
    if count < _ENOUGH or not flow.is_full:
        return
    for key, part in (
        ("hit_rate_first", rates.values[: count // 4]),
        ("hit_rate_last", rates.values[-(count // 4) :]),
    ):
        yield fact(key, min(1.0, sum(part) / len(part)), rates.source)


def workers(flows: Mapping[str, Flow], rates: Mapping[str, tuple[float, Place]]) -> Iterator[Fact]:
    """Each engine of several, by name; `rates` are their hit rates, where those are told."""
    named = {name: flow for name, flow in flows.items() if name}
    if len(named) < 2:
        return
    for name, flow in named.items():
        running, waiting = flow.means
        told: dict[str, tuple[Value, Source]] = {
            "name": (name, flow.source),
            "running": (running, flow.source),
            "waiting": (waiting, flow.source),
        }
        if name in rates:
            told["hit_rate"] = (rates[name][0], source_of(rates[name][1]))
        for key, (value, source) in told.items():
            yield Fact(key=key, value=value, source=source, scope="workers", owner=name)


def source_of(place: Place) -> Source:
    """What to cite."""
    path, line = place
    return Source(path=path, line=line or None)


def fact(key: str, value: Value, source: Source) -> Fact:
    """One that holds for all arms."""
    return Fact(key=key, value=value, source=source)


def tier(name: str, source: Source, figures: Mapping[str, Value]) -> Iterator[Fact]:
    """Those of a tier."""
    for key, value in {"name": name, **figures}.items():
        yield Fact(key=key, value=value, source=source, scope="tiers", owner=name)
