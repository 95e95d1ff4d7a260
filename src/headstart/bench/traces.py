"""Loads from traces: prompts that begin alike where those of a trace did, of made-up tokens.

    trace     what was asked, in the trace's order, or each at its time
    agentic   sessions of agents: each turn follows the answer to the one before, after the time
              that a tool or a person took

The tokens of a piece are made from the seed and its key, so that equal hash ids give equal tokens.
Different ones that follow the same piece give different tokens, however far they are shrunk.

A run has its salt in front of everything. Sessions have none of their own: wherever it stood, it
would cut off something that a later request shares; and what the ids do not share has different
tokens already. Ids of WEKA's sessions are local, so nothing is shared between those: what all
sessions of a tool begin with would be hit, too, where they are served for real.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import shake_256
from pathlib import Path

from headstart.bench.load import (
    SALT_TOKENS,
    TRACED,
    Ask,
    Shape,
    check_size,
    check_vocabulary,
    words_of,
)
from headstart.errors import ConfigError
from headstart.traces.files import open_trace
from headstart.traces.reading import Session, TracedRequest

_CACHED_PIECES = 8192
_MAX_TIME_SCALE = 1e6
_SURELY_DIFFERENT = 4
"""So many random tokens are not drawn twice."""
_MAX_DRAWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What is taken of a trace. Raises ConfigError."""

    limit: int | None = None
    """Sessions, or requests where the trace knows no sessions: its first ones."""
    scale_tokens: float = 1.0
    """Each piece, and each answer, becomes so much shorter, but has at least one token."""
    time_scale: float = 1.0
    """Times and pauses become so much longer."""
    max_prompt_tokens: int | None = None
    """With the salt. A session ends before its first prompt that is longer."""
    block_size: int | None = None
    """Of a hash id, where the file does not tell."""

    def __post_init__(self) -> None:
        if not 0.0 < self.scale_tokens <= 1.0:
            raise ConfigError(
                f"tokens are scaled by more than 0 and at most 1: {self.scale_tokens}"
            )
        if not 0.0 <= self.time_scale <= _MAX_TIME_SCALE:
            raise ConfigError(
                f"times cannot be scaled by {self.time_scale}; 0 to {_MAX_TIME_SCALE:g} can be"
            )
        for name in ("limit", "max_prompt_tokens", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is at least 1, not {value}")


def load_trace(workload: str, path: Path, cut: Cut, shape: Shape) -> list[Ask]:
    """The asks of a trace; `shape` gives seed and vocabulary. Raises ConfigError."""
    if workload not in TRACED:
        known = " and ".join(TRACED)
        raise ConfigError(f"workload {workload!r} is not read from a trace; {known} are")
    check_vocabulary(shape.vocabulary)
    trace = open_trace(path, cut.block_size)
    is_agentic = workload == "agentic"
    if is_agentic and not trace.has_sessions:
        raise ConfigError(
            f"{path}: a trace of {trace.kind} knows no sessions; agentic needs one of agents "
            "(WEKA, MLCommons, ShareGPT), this one is a --workload trace"
        )
    asks: list[Ask] = []
    num_tokens = 0
    for ask in asks_of(trace.sessions, cut, shape, with_pauses=is_agentic):
        asks.append(ask)
        num_tokens += len(ask.tokens)
        check_size(num_tokens)
    if not asks:
        raise ConfigError(f"{path}: nothing is left of it; raise --max-prompt-tokens")
    return asks


def asks_of(
    sessions: Iterable[Session], cut: Cut, shape: Shape, *, with_pauses: bool
) -> Iterator[Ask]:
    """The asks of sessions, before salting."""
    texts = _Texts(shape, cut.scale_tokens)
    num_left = math.inf if cut.limit is None else cut.limit
    for session in sessions:
        ended: set[str] = set()
        is_any = False
        for request in session:
            if request.session in ended or texts.length(request) > _room(cut):
                ended.add(request.session)
                continue
            is_any = True
            yield _ask(request, texts, cut, with_pauses)
        num_left -= is_any
        if num_left <= 0:
            return


def _room(cut: Cut) -> float:
    return math.inf if cut.max_prompt_tokens is None else cut.max_prompt_tokens - SALT_TOKENS


def _ask(request: TracedRequest, texts: _Texts, cut: Cut, with_pauses: bool) -> Ask:
    tokens = texts.prompt(request)
    return Ask(
        session=request.session,
        tokens=tokens,
        num_shared=len(tokens),  # its ids tell what is: see the module
        max_tokens=scaled(max(1, request.output_tokens), cut.scale_tokens),
        turn=request.turn,
        think_s=request.think_s * cut.time_scale if with_pauses else 0.0,
        at_s=None if request.at_s is None else request.at_s * cut.time_scale,
    )


def scaled(num_tokens: int, factor: float) -> int:
    """At least one."""
    return max(1, round(num_tokens * factor))


class _Texts:
    """Makes the tokens of prompts."""

    def __init__(self, shape: Shape, factor: float) -> None:
        self._seed, self._factor, self._vocabulary = shape.seed, factor, shape.vocabulary
        self._words = tuple(words_of(shape.vocabulary))
        self._piece = lru_cache(_CACHED_PIECES)(self._make_piece)
        self._draws: dict[str, int] = {}
        self._taken: set[tuple[str, tuple[int, ...]]] = set()

    def length(self, request: TracedRequest) -> int:
        """Tokens of the prompt, scaled."""
        return sum(scaled(count, self._factor) for _, count in request.pieces)

    def prompt(self, request: TracedRequest) -> tuple[int, ...]:
        """Its tokens. Raises ConfigError where different ids would get the same."""
        if request.tokens is not None and self._factor == 1.0:
            return tuple(map(self._fitted, request.tokens))
        found: list[int] = []
        parent = ""
        for key, count in request.pieces:
            found += self._piece(parent, key, scaled(count, self._factor))
            parent = key
        return tuple(found)

    def _fitted(self, token: int) -> int:
        """A token of a model whose vocabulary may be larger; equal ones stay equal."""
        return token if token < self._vocabulary else self._words[token % len(self._words)]

    def _make_piece(self, parent: str, key: str, count: int) -> tuple[int, ...]:
        if count >= _SURELY_DIFFERENT:
            return self._drawn(key, 0, count)
        if key in self._draws:
            return self._drawn(key, self._draws[key], count)
        for draw in range(_MAX_DRAWS):
            tokens = self._drawn(key, draw, count)
            if (parent, tokens) not in self._taken:
                self._taken.add((parent, tokens))
                self._draws[key] = draw
                return tokens
        raise ConfigError(
            f"blocks of {count} tokens, of {len(self._words)} different ones, are too short to "
            "tell the trace's apart: raise --scale-tokens or --vocabulary"
        )

    def _drawn(self, key: str, draw: int, count: int) -> tuple[int, ...]:
        # Not Python's random numbers: a piece is made again whenever it is not cached.
        raw = shake_256(f"{self._seed}/{draw}/{key}".encode()).digest(4 * count)
        words, num_words = self._words, len(self._words)
        return tuple(words[number % num_words] for number in struct.unpack(f"<{count}I", raw))
