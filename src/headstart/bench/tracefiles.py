"""Files of traces: what was asked of a service, when, and which prompts began alike.

    Mooncake      JSON lines: timestamp (ms), input_length, output_length, hash_ids, each of a block
                  of 512 tokens unless told otherwise; the last block may be shorter
    token ids     JSON lines: input_tok_ids, output_toks, arrival_time_ns
    of agents     see `headstart.bench.agenttraces`

Each may be packed by gzip. Lines are read one by one: one session at a time is held in memory.
Checked against the files of kvcache-ai/Mooncake (FAST'25) and casys-kaist/LLMServingSim.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from headstart.bench.agenttraces import mlcommons, weka
from headstart.bench.traced import (
    NOT_JSON,
    Id,
    Natural,
    Positive,
    Session,
    TracedRequest,
    blocks,
    decoded,
    digest,
    is_tar,
    lines,
    whole,
)
from headstart.errors import ConfigError

MOONCAKE_BLOCK_SIZE = 512
_MAX_TIME = 1e20
"""Nanoseconds since 1970 are 2e18."""
TOKEN_IDS_PIECE = 16
"""Tokens that keep together when prompts of token ids are shrunk."""


class Kind(enum.StrEnum):
    """What a file is."""

    MOONCAKE = "Mooncake"
    WEKA = "WEKA"
    TOKEN_IDS = "token ids"
    MLCOMMONS = "MLCommons"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A trace that is open."""

    kind: Kind
    sessions: Iterator[Session]
    """In the file's order. Raises ConfigError at what is no such trace, with its line."""

    @property
    def has_sessions(self) -> bool:
        """Whether it tells which requests follow each other."""
        return self.kind in (Kind.WEKA, Kind.MLCOMMONS)


def open_trace(path: Path, block_size: int | None = None) -> Trace:
    """The trace in a file, whatever it is. Raises ConfigError.

    `block_size`: tokens a hash id stands for, where the file does not tell.
    """
    kind = _kind_of(path)
    if block_size is not None and kind is not Kind.MOONCAKE:
        raise ConfigError(f"{path}: a trace of {kind} tells the size of its blocks itself")
    if kind is Kind.MOONCAKE:
        sessions = _mooncake(path, block_size or MOONCAKE_BLOCK_SIZE)
    else:
        sessions = {
            Kind.WEKA: weka,
            Kind.TOKEN_IDS: _token_ids,
            Kind.MLCOMMONS: mlcommons,
        }[kind](path)
    return Trace(kind=kind, sessions=_once_each(path, sessions))


def _kind_of(path: Path) -> Kind:
    if is_tar(path):
        return Kind.WEKA
    place, line = next(lines(path), (f"{path}", b""))
    if not line:
        raise ConfigError(f"{path} is empty")
    try:
        row = msgspec.json.decode(line)
    except NOT_JSON as error:
        try:  # one document that is written over several lines?
            row = msgspec.json.decode(whole(path))
        except NOT_JSON:
            raise ConfigError(f"{place}, is not JSON: {error}") from error
    keys = set(row) if isinstance(row, dict) else set()
    if "chat_id" in keys:
        raise ConfigError(f"{path}: traces of Bailian (chat_id) are not read yet")
    if {"timestamp", "input_length"} <= keys:
        return Kind.MOONCAKE
    if "input_tok_ids" in keys:
        return Kind.TOKEN_IDS
    if {"conversation_id", "role"} <= keys:
        return Kind.MLCOMMONS
    if "requests" in keys:
        return Kind.WEKA
    raise ConfigError(
        f"{path} is of no known kind (its keys: {', '.join(sorted(keys)[:8]) or 'none'}); known: "
        "Mooncake (timestamp, input_length), WEKA (requests), token ids (input_tok_ids), MLCommons "
        "(conversation_id, role)"
    )


def _once_each(path: Path, sessions: Iterator[Session]) -> Iterator[Session]:
    seen: set[str] = set()
    for session in sessions:
        names = {request.session for request in session}
        if not seen.isdisjoint(names):
            raise ConfigError(f"{path}: session {min(names & seen)!r} is there twice")
        seen |= names
        yield session


class _Clock:
    """Times since the first one. Raises ConfigError where they go back."""

    def __init__(self) -> None:
        self._first = self._last = -math.inf

    def since_first(self, time: float, place: str) -> float:
        if self._first == -math.inf:
            self._first = time
        if abs(time) > _MAX_TIME:
            raise ConfigError(f"{place}: a time of {time}")
        if time < self._last:
            raise ConfigError(
                f"{place}: time {time} after {self._last}; sort the trace by its times"
            )
        self._last = time
        return time - self._first


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: Positive
    output_length: Natural
    hash_ids: list[Id] = []


def _mooncake(path: Path, block_size: int) -> Iterator[Session]:
    clock = _Clock()
    for number, (place, line) in enumerate(lines(path)):
        row = decoded(line, _Mooncake, place)
        most = -(-row.input_length // block_size)
        if row.hash_ids and not row.input_length // block_size <= len(row.hash_ids) <= most:
            raise ConfigError(
                f"{place}: {len(row.hash_ids)} hash ids are not the blocks of {block_size} tokens "
                f"of a prompt of {row.input_length}; --trace-block-size tells another size"
            )
        yield [
            TracedRequest(
                session=f"{number}",
                turn=0,
                pieces=blocks(row.hash_ids, row.input_length, block_size, "", f"tail/{number}"),
                output_tokens=row.output_length,
                at_s=clock.since_first(row.timestamp, place) / 1000.0,
            )
        ]


class _TokenIds(msgspec.Struct):
    input_tok_ids: Annotated[list[Natural], msgspec.Meta(min_length=1)]
    output_toks: Natural
    arrival_time_ns: float = 0.0


def _token_ids(path: Path) -> Iterator[Session]:
    clock = _Clock()
    for number, (place, line) in enumerate(lines(path)):
        row = decoded(line, _TokenIds, place)
        tokens = row.input_tok_ids
        pieces: list[tuple[str, int]] = []
        for start in range(0, len(tokens), TOKEN_IDS_PIECE):
            piece = tokens[start : start + TOKEN_IDS_PIECE]
            before = pieces[-1][0] if pieces else ""
            pieces.append((digest(f"{before}{piece}"), len(piece)))
        yield [
            TracedRequest(
                session=f"{number}",
                turn=0,
                pieces=tuple(pieces),
                output_tokens=row.output_toks,
                at_s=clock.since_first(row.arrival_time_ns, place) / 1e9,
                tokens=tuple(tokens),
            )
        ]
