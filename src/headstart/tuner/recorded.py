"""A trace in memory: which blocks each request's prompt has, as flat arrays.

    blocks   a a' b | a a' c c' | ...      one request after another, each in prompt order
    starts   0        3           7 ...    request i has blocks [starts[i], starts[i + 1])

Blocks are numbered in the order of their first use, so a parent's number is below its children's.
A number stands for a block and all that is before it: where a trace uses one id after different
blocks, it gets a number for each, so that blocks form a forest and no prompt has one twice.

Requests are sorted by their times. A trace that has none (WEKA, MLCommons) is given some: sessions
start by chance, and a turn follows the one before after its pause. How long a server took to answer
is not known, so that turns come closer together than they did.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.errors import ConfigError
from headstart.traces.files import Kind, open_trace
from headstart.traces.reading import Broken, Session, TracedRequest
from headstart.traces.sampling import MANY_CHILDREN, Sample, Untold

Ints = npt.NDArray[np.signedinteger]
Floats = npt.NDArray[np.float64]

DEFAULT_BLOCK_SIZE = 16
"""Of traces that have texts or tokens, not ids of blocks."""
SESSIONS_PER_S = 1 / 60
TEXTS = (Kind.MLCOMMONS, Kind.SHAREGPT)
"""Which have blocks of any size."""
NO_PARENT = -1
Advance = Callable[[int], None]
"""Told the number of requests that are done, now and then."""
_EVERY = 500


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """See the module. Of requests: one number each."""

    kind: Kind
    block_size: int
    blocks: Ints
    starts: Ints
    parent: Ints
    """Of each block, by its number; NO_PARENT: it begins a prompt."""
    last_tokens: Ints
    """Of the request's last block, which may be shorter than the others."""
    input_tokens: Ints
    """With those that are in no block."""
    output_tokens: Ints
    session: Ints
    """A number that requests of one session share."""
    agent: Ints
    """Within its session: 0, and a number for each nested one."""
    place: Ints
    """In the file."""
    at_s: Floats
    think_s: Floats
    has_times: bool
    """Whether the trace tells them."""
    has_sessions: bool
    """Whether the trace tells them; else they are prompts that begin alike."""
    num_unchained: int = 0
    """Uses of an id after another block than at its first use."""
    share: float = 1.0
    """Of the trace's prompt tokens, if it is a sample of its sessions."""

    def __len__(self) -> int:
        """Requests."""
        return len(self.starts) - 1

    @property
    def lengths(self) -> Ints:
        """Blocks of each request."""
        found: Ints = np.diff(self.starts)
        return found

    def tokens(self) -> Ints:
        """Of each of `blocks`."""
        found = np.full(len(self.blocks), self.block_size, np.int32)
        any_blocks = self.lengths > 0
        found[self.starts[1:][any_blocks] - 1] = self.last_tokens[any_blocks]
        return found

    def prefix_tokens(self, num_blocks: Ints) -> Ints:
        """Tokens of the first so many blocks of each request."""
        is_all = (num_blocks == self.lengths) & (num_blocks > 0)
        short = np.where(is_all, self.block_size - self.last_tokens, 0)
        found: Ints = num_blocks.astype(np.int64) * self.block_size - short
        return found

    def chosen(self, is_chosen: npt.NDArray[np.bool_]) -> Recorded:
        """Some of the requests, of the same blocks."""
        lengths = self.lengths
        return replace(
            self,
            blocks=self.blocks[np.repeat(is_chosen, lengths)],
            starts=_starts_of(lengths[is_chosen]),
            **{name: getattr(self, name)[is_chosen] for name in _OF_REQUESTS},
        )

    def parts(self, number: int, seed: int) -> list[Recorded]:
        """The requests, divided by chance: whole sessions, about as many in each part."""
        names, sessions = np.unique(self.session, return_inverse=True)
        part = np.random.default_rng(seed).permutation(len(names))[sessions] % number
        found = [self.chosen(part == each) for each in range(number)]
        all_tokens = max(1, int(self.input_tokens.sum()))
        return [
            replace(each, share=self.share * int(each.input_tokens.sum()) / all_tokens)
            for each in found
        ]

    def coarser(self, factor: int) -> Recorded:
        """The same prompts in blocks that are `factor` times as long.

        A last block that is shorter stays one only where this trace has such blocks.
        """
        size = self.block_size * factor
        lengths = self.lengths
        cached = self.prefix_tokens(lengths)
        has_short = bool((self.last_tokens[lengths > 0] < self.block_size).any())
        new_lengths = -(-cached // size) if has_short else cached // size
        starts = _starts_of(new_lengths)
        within = np.arange(starts[-1]) - np.repeat(starts[:-1], new_lengths)
        last = np.minimum((within + 1) * factor, np.repeat(lengths, new_lengths)) - 1
        blocks = self.blocks[np.repeat(self.starts[:-1], new_lengths) + last]
        # The parent is the block that ends where this one begins: `factor` steps up the forest.
        parent = np.full(len(self.parent), NO_PARENT, np.int32)
        is_child = within > 0
        parent[blocks[is_child]] = blocks[np.flatnonzero(is_child) - 1]
        return replace(
            self,
            block_size=size,
            blocks=blocks,
            starts=starts,
            parent=parent,
            last_tokens=(cached - (new_lengths - 1) * size).clip(0, size).astype(np.int32),
        )


_OF_REQUESTS = (
    *("last_tokens", "input_tokens", "output_tokens", "session", "agent", "place"),
    *("at_s", "think_s"),
)


def record(  # noqa: PLR0913 - what `headstart trace` and `tune` let people choose
    path: Path,
    *,
    block_size: int | None = None,
    trace_block_size: int | None = None,
    unit_s: float | None = None,
    sessions_per_s: float = SESSIONS_PER_S,
    seed: int = 0,
    share: float = 1.0,
    broken: Broken | None = None,
    advance: Advance = lambda num_requests: None,
) -> Recorded:
    """Read a trace. Raises ConfigError.

    `block_size`: of the blocks; by default the trace's. `trace_block_size`: tokens that its ids
    stand for, and `unit_s` what its times count, where it does not tell. `sessions_per_s`: for one
    without times. `share`: of its sessions, by a hash; the others are not kept in memory. `broken`
    counts what cannot be read.
    """
    if not 0.0 < sessions_per_s < math.inf:
        raise ConfigError(f"sessions cannot start at a rate of {sessions_per_s} a second")
    sample = Sample(share, seed)
    trace = open_trace(path, trace_block_size, broken, None if share == 1.0 else sample, unit_s)
    untold: Untold | None = None
    if share < 1.0 and not trace.has_sessions:
        # Read once before; what is broken is counted when it is read for good.
        before = open_trace(path, trace_block_size, None if broken is None else Broken())
        untold = Untold(sample, before.sessions, before.block_size or 1)
    recorder = _Recorder(block_size)
    num_read = 0
    for number, read in enumerate(trace.sessions):
        session = read if untold is None else untold.taken(read)
        if session:
            recorder.add(number, session, trace.kind, trace.block_size)
        num_read += max(1, len(read))
        if number % _EVERY == 0:
            advance(len(recorder.lengths))
    _check_read(path, num_read, broken)
    if not recorder.lengths:
        raise ConfigError(f"no session is left of a share of {share}; take more")
    recorded = recorder.recorded(trace.kind, has_sessions=trace.has_sessions)
    recorded = _timed(recorded, sessions_per_s, seed, None if untold is None else untold.numbers)
    num_taken = int(recorded.input_tokens.sum())
    return replace(recorded, share=num_taken / (num_taken + sample.tokens_left))


def each_request(recorded: Recorded, advance: Advance) -> Iterator[tuple[int, list[int]]]:
    """Number and blocks of each request, in order."""
    starts = recorded.starts.tolist()
    for number in range(len(recorded)):
        if number % _EVERY == 0:
            advance(number)
        yield number, recorded.blocks[starts[number] : starts[number + 1]].tolist()


def _check_read(path: Path, num_requests: int, broken: Broken | None) -> None:
    """Raises ConfigError where a result would stand for less than half of the trace."""
    first = f": {broken.first[0]}" if broken is not None and broken.first else ""
    if not num_requests:
        raise ConfigError(f"{path} has no request that can be read{first}")
    if broken is not None and broken.count > num_requests:
        raise ConfigError(f"{path}: {broken.count:,} lines, most of it, cannot be read{first}")


class _Recorder:
    """Collects requests in arrays that grow."""

    def __init__(self, block_size: int | None) -> None:
        self.block_size = block_size
        self.lengths = array("i")
        self._numbers: dict[object, int] = {}
        self._parents = array("i")
        self._blocks = array("i")
        self._columns: dict[str, array[Any]] = {
            name: array("d" if name.endswith("_s") else "q") for name in _OF_REQUESTS
        }
        self._num_unchained = 0

    def add(self, number: int, session: Session, kind: Kind, piece_size: int | None) -> None:
        """The requests of a session."""
        if self.block_size is None or not self.lengths:
            self._choose_size(kind, piece_size or _piece_size(kind, session))
        columns = self._columns
        agents: dict[str, int] = {}
        for request in session:
            num_blocks, last_tokens = self._add_blocks(request)
            self.lengths.append(num_blocks)
            columns["last_tokens"].append(last_tokens)
            columns["input_tokens"].append(sum(count for _, count in request.pieces))
            columns["output_tokens"].append(request.output_tokens)
            columns["session"].append(number)
            columns["agent"].append(agents.setdefault(request.session, len(agents)))
            columns["place"].append(len(self.lengths) - 1)
            columns["at_s"].append(math.nan if request.at_s is None else request.at_s)
            columns["think_s"].append(request.think_s)

    def _choose_size(self, kind: Kind, piece_size: int) -> None:
        size = self.block_size or piece_size
        if kind not in TEXTS and size % piece_size:
            raise ConfigError(
                f"blocks of {size} tokens cannot be told from a trace of {kind} whose blocks have "
                f"{piece_size}; a multiple of that can"
            )
        self.block_size = size

    def _add_blocks(self, request: TracedRequest) -> tuple[int, int]:
        """Number of blocks, and tokens of the last."""
        assert self.block_size is not None
        numbers, parents, blocks = self._numbers, self._parents, self._blocks
        above, last_tokens, num_before = NO_PARENT, 0, len(blocks)
        for name, num_tokens in cut(request, self.block_size):
            number = numbers.get(name)
            if number is None:
                number = numbers[name] = len(parents)
                parents.append(above)
            elif parents[number] != above:
                self._num_unchained += 1
                number = numbers.setdefault((above, name), len(parents))
                if number == len(parents):
                    parents.append(above)
            blocks.append(number)
            above, last_tokens = number, num_tokens
        return len(blocks) - num_before, last_tokens

    def recorded(self, kind: Kind, *, has_sessions: bool) -> Recorded:
        """What was collected, in the file's order."""
        assert self.block_size is not None
        columns = {name: np.array(column) for name, column in self._columns.items()}
        at_s = columns["at_s"]
        return Recorded(
            kind=kind,
            block_size=self.block_size,
            blocks=np.array(self._blocks, np.int32),
            starts=_starts_of(np.array(self.lengths)),
            parent=np.array(self._parents, np.int32),
            has_times=not bool(np.isnan(at_s).any()),
            has_sessions=has_sessions,
            num_unchained=self._num_unchained,
            share=1.0,
            **columns,
        )


def _piece_size(kind: Kind, session: Session) -> int:
    if kind in TEXTS:
        return DEFAULT_BLOCK_SIZE
    return max(request.pieces[0][1] for request in session)


def cut(request: TracedRequest, block_size: int) -> Iterator[tuple[object, int]]:
    """Name and tokens of each block of a prompt.

    A block has the name of the piece in which it ends, and where in it: equal pieces follow equal
    text, so that this stands for all that is before. What is left at the end, shorter than a block,
    is one only where the trace has an id for it.
    """
    done, end = 0, block_size
    name, count = "", 0
    for name, count in request.pieces:
        done += count
        while end <= done:
            inside = end - done + count
            yield (name if inside == count else (name, inside)), block_size
            end += block_size
    rest = done - end + block_size
    if rest and request.has_short_block:
        yield name, rest


def _timed(
    recorded: Recorded, sessions_per_s: float, seed: int, sessions: array[int] | None
) -> Recorded:
    """Sorted by time, which is made up where the trace has none; with sessions, told or known."""
    if not recorded.has_times:
        made = _made_up(recorded, sessions_per_s, seed)
        recorded = replace(recorded, at_s=made)
    if not recorded.has_sessions:
        found = _alike(recorded) if sessions is None else np.array(sessions)
        recorded = replace(recorded, session=found)
    at_s = recorded.at_s
    if (at_s[1:] >= at_s[:-1]).all():
        return recorded
    order = np.argsort(at_s, kind="stable")
    lengths = recorded.lengths[order]
    starts = _starts_of(lengths)
    moved = np.arange(starts[-1]) + np.repeat(recorded.starts[:-1][order] - starts[:-1], lengths)
    return replace(
        recorded,
        blocks=recorded.blocks[moved],
        starts=starts,
        **{name: getattr(recorded, name)[order] for name in _OF_REQUESTS},
    )


def _made_up(recorded: Recorded, sessions_per_s: float, seed: int) -> Floats:
    """Times: sessions start by chance, turns follow their pauses, nested ones their session."""
    num_sessions = int(recorded.session[-1]) + 1
    gaps = np.random.default_rng(seed).exponential(1.0 / sessions_per_s, num_sessions)
    session_starts = np.cumsum(gaps) - gaps[0]
    found = np.empty(len(recorded))
    clocks: dict[int, float] = {}
    session, now = -1, 0.0
    columns = (recorded.session.tolist(), recorded.agent.tolist(), recorded.think_s.tolist())
    for number, (each, agent, pause) in enumerate(zip(*columns, strict=True)):
        if each != session:
            session, now, clocks = each, float(session_starts[each]), {}
        now = clocks[agent] = clocks.get(agent, now) + pause
        found[number] = now
    return found


def _alike(recorded: Recorded) -> Ints:
    """Sessions of a trace that does not tell them: prompts that begin alike.

    Alike beyond what is common: a session is named by the block after the last one that more than
    `MANY_CHILDREN` others follow. A request without blocks is alone.
    """
    parents = recorded.parent
    children = np.bincount(parents[parents >= 0], minlength=len(parents))
    is_new = (parents < 0) | (children[parents] > MANY_CHILDREN)
    named = np.where(is_new, np.arange(len(parents)), parents)
    while (named != named[named]).any():  # doubles the way up each time
        named = named[named]
    lengths = recorded.lengths
    found = len(parents) + np.arange(len(recorded))
    found[lengths > 0] = named[recorded.blocks[recorded.starts[1:][lengths > 0] - 1]]
    numbers: Ints = np.unique(found, return_inverse=True)[1]
    return numbers


def _starts_of(lengths: Ints) -> Ints:
    return np.append(0, np.cumsum(lengths, dtype=np.int64))
