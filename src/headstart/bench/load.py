"""Loads: which prompts are asked, by whom, when, and how much of them a cache could know.

Prompts are token ids, so that every server computes the same ones. Each carries two salts, so that
no run profits from another and no session from one that is not meant to share:

    run salt | what all share (system prompt, documents) | session salt | the session's own

A prompt of which nothing is its session's own has the first salt only: those of traces, which tell
by themselves what is shared (`headstart.bench.traces`).

Answers of earlier turns are made up, with a seed: what a model answers would differ between arms.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from headstart.errors import ConfigError

SALT_TOKENS = 8
VOCABULARY = 30_000
"""Ordinary words in those of all models in use; special tokens lie at the ends of theirs."""
MAX_TOKENS = 1 << 31
"""Of all prompts of a load together: it is held in memory."""
_MAX_VOCABULARY = 1 << 31
_MAX_THINK_S = 1e9
_FIRST_SHARE = 30
TRACED = ("trace", "agentic")
"""Workloads that `headstart.bench.traces` reads from a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt."""

    session: str
    tokens: tuple[int, ...]
    num_shared: int
    """Tokens at its start that other sessions may have, too."""
    max_tokens: int
    turn: int = 0
    think_s: float = 0.0
    """After the answer to the session's turn before."""
    at_s: float | None = None
    """When its trace had it, since the start; None: nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large a load is; each workload reads what it needs."""

    sessions: int = 16
    turns: int = 4
    shared_tokens: int = 1024
    own_tokens: int = 256
    output_tokens: int = 32
    documents: int = 8
    think_s: float = 0.0
    seed: int = 0
    vocabulary: int = VOCABULARY
    """Token ids are smaller."""


def _shared_prefix(shape: Shape, rng: random.Random) -> Iterator[Ask]:
    """One system prompt, and a question of its own a session."""
    system = _words(shape, rng, shape.shared_tokens)
    for number in range(shape.sessions):
        yield _ask(shape, number, system, _words(shape, rng, shape.own_tokens))


def _multi_turn(shape: Shape, rng: random.Random) -> Iterator[Ask]:
    """Chats that grow by question and answer, turn by turn."""
    system = _words(shape, rng, shape.shared_tokens)
    said: list[tuple[int, ...]] = [()] * shape.sessions
    for turn in range(shape.turns):
        for number in range(shape.sessions):
            said[number] += _words(shape, rng, shape.own_tokens)
            yield _ask(shape, number, system, said[number], turn)
            said[number] += _words(shape, rng, shape.output_tokens)


def _rag(shape: Shape, rng: random.Random) -> Iterator[Ask]:
    """The same documents in another order for each question: prefixes seldom agree."""
    length = max(1, shape.shared_tokens // shape.documents)
    documents = [_words(shape, rng, length) for _ in range(shape.documents)]
    for number in range(shape.sessions):
        order = rng.sample(documents, len(documents))
        yield _ask(shape, number, sum(order, ()), _words(shape, rng, shape.own_tokens))


def _unique(shape: Shape, rng: random.Random) -> Iterator[Ask]:
    """Nothing to hit."""
    for number in range(shape.sessions):
        yield _ask(shape, number, (), _words(shape, rng, shape.shared_tokens + shape.own_tokens))


WORKLOADS: dict[str, Callable[[Shape, random.Random], Iterator[Ask]]] = {
    "shared-prefix": _shared_prefix,
    "multi-turn": _multi_turn,
    "rag": _rag,
    "unique": _unique,
}


def make_load(workload: str, shape: Shape) -> list[Ask]:
    """The asks of a workload, in the order in which they are first possible. Raises ConfigError."""
    if workload not in WORKLOADS:
        known = ", ".join((*WORKLOADS, *TRACED))
        raise ConfigError(f"workload {workload!r} is unknown; known: {known}")
    if min(shape.sessions, shape.turns, shape.own_tokens, shape.output_tokens) < 1:
        raise ConfigError("sessions, turns, own tokens and output tokens are at least 1")
    check_vocabulary(shape.vocabulary)
    if shape.shared_tokens < 0 or shape.documents < 1:
        raise ConfigError("shared tokens are not negative, documents at least 1")
    if not 0.0 <= shape.think_s <= _MAX_THINK_S:
        raise ConfigError(f"thinking for {shape.think_s} s; 0 to {_MAX_THINK_S:g} s are possible")
    check_size(_most_tokens(workload, shape))
    return list(WORKLOADS[workload](shape, random.Random(f"{workload}/{shape.seed}")))


def _most_tokens(workload: str, shape: Shape) -> int:
    """Of all prompts together, at most."""
    turns = shape.turns if workload == "multi-turn" else 1
    shared = max(shape.shared_tokens, shape.documents if workload == "rag" else 0)
    longest = shared + turns * (shape.own_tokens + shape.output_tokens)
    return shape.sessions * turns * longest


def check_size(num_tokens: int) -> None:
    """Raises ConfigError where a load is too large to be held."""
    if num_tokens > MAX_TOKENS:
        raise ConfigError(
            f"a load of {num_tokens:.3g} prompt tokens is too large to be held in memory; at most "
            f"{MAX_TOKENS:.3g} are: take fewer sessions or turns, or shorter texts"
        )


def check_vocabulary(vocabulary: int) -> None:
    """Raises ConfigError where no texts can be made of it."""
    if not _FIRST_SHARE <= vocabulary <= _MAX_VOCABULARY:
        raise ConfigError(
            f"a vocabulary of {vocabulary} tokens; it has {_FIRST_SHARE} to {_MAX_VOCABULARY}"
        )


def salted(asks: Iterable[Ask], salt: str, shape: Shape) -> list[Ask]:
    """The asks of one run: see the module."""

    def words(*names: str) -> tuple[int, ...]:
        return _words(shape, random.Random("/".join(names)), SALT_TOKENS)

    found = []
    for ask in asks:
        shared, own = ask.tokens[: ask.num_shared], ask.tokens[ask.num_shared :]
        tokens = words(salt) + shared + (words(salt, ask.session) + own if own else ())
        found.append(replace(ask, tokens=tokens, num_shared=SALT_TOKENS + len(shared)))
    return found


def fingerprint(asks: Iterable[Ask]) -> str:
    """A digest of what is asked."""
    digest = blake2b(digest_size=16)
    for ask in asks:
        digest.update(repr((ask.session, ask.tokens, ask.max_tokens)).encode())
    return digest.hexdigest()


def theoretical_hits(asks: Iterable[Ask], block_size: int) -> list[int]:
    """Tokens of each prompt that a cache without limit would know, if asked in this order.

    Whole blocks, and never the last token, which every engine computes.
    """
    known: set[bytes] = set()
    hits = []
    for ask in asks:
        chain, hit, is_hit = b"", 0, True
        tokens = array("Q", ask.tokens)
        for start in range(0, len(tokens) - block_size + 1, block_size):
            block = tokens[start : start + block_size].tobytes()
            chain = blake2b(chain + block, digest_size=16).digest()
            is_hit = is_hit and chain in known
            hit += block_size * is_hit
            known.add(chain)
        hits.append(min(hit, len(ask.tokens) - 1))
    return hits


def hit_rate(asks: Sequence[Ask], block_size: int) -> float:
    """The same as a share of all tokens asked."""
    asked = sum(len(ask.tokens) for ask in asks)
    return sum(theoretical_hits(asks, block_size)) / asked


def _ask(
    shape: Shape, number: int, shared: tuple[int, ...], own: tuple[int, ...], turn: int = 0
) -> Ask:
    return Ask(
        session=f"{number}",
        tokens=shared + own,
        num_shared=len(shared),
        max_tokens=shape.output_tokens,
        turn=turn,
        think_s=shape.think_s if turn else 0.0,
    )


def words_of(vocabulary: int) -> range:
    """The token ids that texts are made of."""
    return range(vocabulary // _FIRST_SHARE, vocabulary)


def _words(shape: Shape, rng: random.Random, count: int) -> tuple[int, ...]:
    words = words_of(shape.vocabulary)
    return tuple(rng.randrange(words.start, words.stop) for _ in range(count))
