"""Files of traces: what was asked of a service, when, and which prompts began alike.

    Mooncake      JSON lines: timestamp (ms), input_length, output_length, hash_ids, each of a block
                  of 512 tokens unless told otherwise, by who reads it or by its own block_size;
                  the last block may be shorter
    Bailian       JSON lines: chat_id, timestamp (s), input_length, output_length, hash_ids, each of
                  16 tokens; after the description of alibaba-edu/qwen-bailian-usagetraces-anon, not
                  checked against its files
    token ids     JSON lines: input_tok_ids, output_toks, arrival_time_ns
    Headstart     JSON lines: what `headstart trace convert` writes (`Line`)
    vLLM's `timed_trace` has Mooncake's keys; its times count seconds unless told otherwise
    of sessions   see `headstart.traces.agents`

Each may be packed by gzip, or be a folder of such files. Lines are read one by one: one session at
a time is held in memory. Checked against the files of kvcache-ai/Mooncake (FAST'25) and
casys-kaist/LLMServingSim.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec

from headstart.errors import ConfigError
from headstart.traces.agents import mlcommons, sharegpt, weka
from headstart.traces.reading import (
    NOT_JSON,
    Broken,
    Id,
    Natural,
    Positive,
    Session,
    TracedRequest,
    blocks,
    decoded,
    digest,
    files_of,
    is_tar,
    lines,
    members,
    skip,
    whole,
)
from headstart.traces.sampling import Sample

MOONCAKE_BLOCK_SIZE = 512
BAILIAN_BLOCK_SIZE = 16
_MAX_TIME = 1e20
"""Nanoseconds since 1970 are 2e18."""
_MAX_UNIT_S = 3600.0
TOKEN_IDS_PIECE = 16
"""Tokens that keep together when prompts of token ids are shrunk."""
SCHEMA = "headstart.trace/1"
_TRIED_LINES = 100
"""Of which one has to tell what a trace is, where broken ones are only counted."""


class Kind(enum.StrEnum):
    """What a file is."""

    MOONCAKE = "Mooncake"
    BAILIAN = "Bailian"
    WEKA = "WEKA"
    TOKEN_IDS = "token ids"
    MLCOMMONS = "MLCommons"
    SHAREGPT = "ShareGPT"
    HEADSTART = "Headstart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A trace that is open."""

    kind: Kind
    sessions: Iterator[Session]
    """In the file's order. Raises ConfigError at what is no such trace, with its line.

    An empty one stands for one that a sample leaves."""
    has_sessions: bool
    """Whether it tells which requests follow each other."""
    block_size: int | None = None
    """Tokens that a piece has at most, where that is known before any is read."""


def open_trace(
    path: Path,
    block_size: int | None = None,
    broken: Broken | None = None,
    sample: Sample | None = None,
    unit_s: float | None = None,
) -> Trace:
    """The trace in a file or folder, whatever it is. Raises ConfigError.

    `block_size`: tokens a hash id stands for, and `unit_s` what its times count, by default ms,
    where the file does not tell. `broken` counts what
    cannot be read; without it that is an error. Times may then go back, too: the caller sorts.
    Only the sessions of `sample` are read, where the trace tells which they are.
    """
    kind, first = _kind_of(path, broken)
    if block_size is not None and kind is not Kind.MOONCAKE:
        raise ConfigError(f"{path}: a trace of {kind} tells the size of its blocks itself")
    if unit_s is not None and kind is not Kind.MOONCAKE:
        raise ConfigError(f"{path}: it is known what times of {kind} count")
    if unit_s is not None and not 0.0 < unit_s <= _MAX_UNIT_S:
        raise ConfigError(f"times cannot count {unit_s:g} s; 1s or 1ms they can")
    sessions: Iterator[Session]
    has_sessions = kind in (Kind.WEKA, Kind.MLCOMMONS, Kind.SHAREGPT)
    if kind is Kind.MOONCAKE:
        block_size = _mooncake_block_size(path, first, block_size)
        sessions = _mooncake(path, block_size, 1e3 if unit_s is None else 1.0 / unit_s, broken)
    elif kind is Kind.BAILIAN:
        block_size = BAILIAN_BLOCK_SIZE
        sessions = _mooncake(path, block_size, 1.0, broken)
    elif kind is Kind.HEADSTART:
        header = decoded(first, Header, f"{path}, line 1")
        block_size, has_sessions = header.block_size, header.has_sessions
        sessions = _headstart(path, block_size, broken)
    elif kind is Kind.TOKEN_IDS:
        block_size = TOKEN_IDS_PIECE
        sessions = _token_ids(path, broken)
    elif kind is Kind.WEKA:
        sessions = weka(path, broken, sample)
    elif kind is Kind.SHAREGPT:
        sessions = sharegpt(path, broken)
    else:
        sessions = mlcommons(path, broken)
    if sample is not None and has_sessions and kind is not Kind.WEKA:
        sessions = sample.of(sessions)
    if kind in (Kind.WEKA, Kind.MLCOMMONS, Kind.HEADSTART):  # others' are lines, by their numbers
        sessions = _once_each(path, sessions, broken)
    return Trace(
        kind=kind,
        sessions=sessions,
        has_sessions=has_sessions,
        block_size=block_size,
    )


def _kind_of(path: Path, broken: Broken | None) -> tuple[Kind, bytes]:
    """With the line that tells it."""
    first = files_of(path)[0]
    is_packed = is_tar(first)
    name, text = next(members(first), ("", b"")) if is_packed else ("", b"")
    if name.endswith(".json"):
        try:
            return _kind_of_row(first, msgspec.json.decode(text)), text
        except NOT_JSON:
            return Kind.WEKA, b""
    rows: list[tuple[str, bytes]] = []
    for row in islice(lines(first), 1 if broken is None else _TRIED_LINES):
        rows.append(row)
        try:  # one by one: what comes before damage tells it, too
            return _kind_of_row(first, msgspec.json.decode(row[1])), row[1]
        except NOT_JSON:
            continue
    if not rows:
        inside = " of .json, .jsonl and .ndjson files" if is_packed else ""
        raise ConfigError(f"{first} is empty{inside}")
    place, line = rows[0]
    try:  # one document that is written over several lines?
        text = line if is_packed else whole(first)
        return _kind_of_row(first, msgspec.json.decode(text)), line
    except NOT_JSON as error:
        raise ConfigError(f"{place}, is not JSON: {error}") from error


_TOLD_BY = (
    (Kind.BAILIAN, {"chat_id", "timestamp", "input_length"}),
    (Kind.MOONCAKE, {"timestamp", "input_length"}),
    (Kind.TOKEN_IDS, {"input_tok_ids"}),
    (Kind.MLCOMMONS, {"conversation_id", "role"}),
    (Kind.WEKA, {"requests"}),
    (Kind.SHAREGPT, {"conversations"}),
)
"""By which keys, the first that has them."""


def _kind_of_row(path: Path, row: object) -> Kind:
    if isinstance(row, list) and row:  # an array of conversations
        kind = _kind_of_row(path, row[0])
        if kind is Kind.SHAREGPT:
            return kind
        raise ConfigError(f"{path} is an array of {kind}; write one a line")
    keys = set(row) if isinstance(row, dict) else set()
    if isinstance(row, dict) and row.get("schema") == SCHEMA:
        return Kind.HEADSTART
    for kind, telling in _TOLD_BY:
        if telling <= keys:
            return kind
    raise ConfigError(
        f"{path} is of no known kind (its keys: {', '.join(sorted(keys)[:8]) or 'none'}); known: "
        "Mooncake (timestamp, input_length), Bailian (chat_id as well), WEKA (requests), token ids "
        "(input_tok_ids), MLCommons (conversation_id, role), ShareGPT (conversations), Headstart "
        "(schema)"
    )


def _once_each(path: Path, sessions: Iterator[Session], broken: Broken | None) -> Iterator[Session]:
    seen: set[str] = set()
    for session in sessions:
        names = {request.session for request in session}
        if not seen.isdisjoint(names):
            skip(broken, ConfigError(f"{path}: session {min(names & seen)!r} is there twice"))
            continue
        seen |= names
        yield session


class _Clock:
    """Times since the first one. Raises ConfigError where they go back, unless they may."""

    def __init__(self, ticks_per_s: float, *, may_go_back: bool) -> None:
        self._ticks_per_s = ticks_per_s
        self._first = self._last = -math.inf
        self._may_go_back = may_go_back

    def since_first_s(self, time: float, place: str) -> float:
        if not -_MAX_TIME < time < _MAX_TIME:
            raise ConfigError(f"{place}: a time of {time}")
        if time < self._last and not self._may_go_back:
            raise ConfigError(
                f"{place}: time {time} after {self._last}; sort the trace by its times"
            )
        if self._first == -math.inf:
            self._first = time
        self._last = time
        return (time - self._first) / self._ticks_per_s


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: Positive
    output_length: Natural
    hash_ids: list[Id] = []
    block_size: Positive | None = None


class _MooncakeSize(msgspec.Struct):
    block_size: Positive | None = None


def _mooncake_block_size(path: Path, first: bytes, asked: int | None) -> int:
    """What the first line tells, or else who reads it. Raises ConfigError where both do."""
    told = decoded(first, _MooncakeSize, f"{path}, its first line").block_size
    if told is not None and asked not in (None, told):
        raise ConfigError(
            f"{path}: its hash ids stand for {told} tokens, as it says itself, not for {asked}; "
            "leave out --trace-block-size"
        )
    return told or asked or MOONCAKE_BLOCK_SIZE


def _mooncake(
    path: Path, block_size: int, ticks_per_s: float, broken: Broken | None
) -> Iterator[Session]:
    clock = _Clock(ticks_per_s, may_go_back=broken is not None)
    for number, (place, line) in enumerate(lines(path, broken)):
        try:
            yield [
                _mooncake_request(number, decoded(line, _Mooncake, place), block_size, clock, place)
            ]
        except ConfigError as error:
            skip(broken, error)


def _mooncake_request(
    number: int, row: _Mooncake, block_size: int, clock: _Clock, place: str
) -> TracedRequest:
    if row.block_size not in (None, block_size):
        raise ConfigError(
            f"{place}: blocks of {row.block_size} tokens after some of {block_size}: prompts of "
            "several models? Record one, with `headstart node record --namespace`"
        )
    _check_ids(row.hash_ids, row.input_length, block_size, place)
    return TracedRequest(
        session=f"{number}",
        turn=0,
        pieces=blocks(row.hash_ids, row.input_length, block_size, "", f"tail/{number}"),
        output_tokens=row.output_length,
        at_s=clock.since_first_s(row.timestamp, place),
        has_short_block=len(row.hash_ids) * block_size > row.input_length,
    )


def _check_ids(ids: list[Id], num_tokens: int, block_size: int, place: str) -> None:
    most = -(-num_tokens // block_size)
    if ids and not num_tokens // block_size <= len(ids) <= most:
        raise ConfigError(
            f"{place}: {len(ids)} hash ids are not the blocks of {block_size} tokens of a prompt "
            f"of {num_tokens}; --trace-block-size tells another size"
        )


class _TokenIds(msgspec.Struct):
    input_tok_ids: Annotated[list[Natural], msgspec.Meta(min_length=1)]
    output_toks: Natural
    arrival_time_ns: float = 0.0


def _token_ids(path: Path, broken: Broken | None) -> Iterator[Session]:
    clock = _Clock(1e9, may_go_back=broken is not None)
    for number, (place, line) in enumerate(lines(path, broken)):
        try:
            yield [_token_ids_request(number, decoded(line, _TokenIds, place), clock, place)]
        except ConfigError as error:
            skip(broken, error)


def _token_ids_request(number: int, row: _TokenIds, clock: _Clock, place: str) -> TracedRequest:
    tokens = row.input_tok_ids
    pieces: list[tuple[str, int]] = []
    for start in range(0, len(tokens), TOKEN_IDS_PIECE):
        piece = tokens[start : start + TOKEN_IDS_PIECE]
        before = pieces[-1][0] if pieces else ""
        pieces.append((digest(f"{before}{piece}"), len(piece)))
    return TracedRequest(
        session=f"{number}",
        turn=0,
        pieces=tuple(pieces),
        output_tokens=row.output_toks,
        at_s=clock.since_first_s(row.arrival_time_ns, place),
        tokens=tuple(tokens),
    )


class Header(msgspec.Struct, kw_only=True):
    """The first line of Headstart's own form."""

    schema: str = SCHEMA
    block_size: Positive
    has_sessions: bool


class Line(msgspec.Struct, omit_defaults=True):
    """A request in Headstart's own form. Those of a session follow each other."""

    session: str
    """A nested one's is that of the one it is in, a slash and more."""
    num_in: Positive = msgspec.field(name="in")
    num_out: Natural = msgspec.field(name="out")
    ids: list[Id]
    turn: Natural = 0
    at_s: Annotated[float, msgspec.Meta(ge=-_MAX_TIME, le=_MAX_TIME)] | None = None
    think_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0


def _headstart(path: Path, block_size: int, broken: Broken | None) -> Iterator[Session]:
    found: Session = []
    for place, line in islice(lines(path, broken), 1, None):
        try:
            row = decoded(line, Line, place)
            _check_ids(row.ids, row.num_in, block_size, place)
        except ConfigError as error:
            skip(broken, error)
            continue
        if found and found[-1].session.split("/")[0] != row.session.split("/")[0]:
            yield found
            found = []
        tail = f"{row.session}/tail/{row.turn}"
        found.append(
            TracedRequest(
                session=row.session,
                turn=row.turn,
                pieces=blocks(row.ids, row.num_in, block_size, "", tail),
                output_tokens=row.num_out,
                at_s=row.at_s,
                think_s=row.think_s,
                has_short_block=len(row.ids) * block_size > row.num_in,
            )
        )
    if found:
        yield found
