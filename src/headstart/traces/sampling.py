"""A share of a trace's sessions, taken while it is read, so that the rest never is in memory.

A session is taken or left by a hash of its name, so whole, and the same ones whatever the order; a
larger share of the same seed has them, too.

Where a trace does not tell its sessions, one is named by the first block of its prompts that is not
common. Common is what more than a few different blocks follow, and all before it: found by reading
the trace once before, of which a bounded part is kept (Waldspurger et al. 2015 sample blocks; those
of prefixes must be taken together).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import pairwise

from headstart.errors import ConfigError
from headstart.traces.reading import Session, TracedRequest

MANY_CHILDREN = 16
"""A block that more different ones follow is what sessions have in common, not a part of one."""
_MOST_LOOKED_AT = 400_000
"""Blocks of the requests that are looked at to find what is common."""
_HASH_NBYTES = 8


class Sample:
    """Which sessions are taken, and how much has been left. Raises ConfigError."""

    def __init__(self, share: float, seed: int = 0) -> None:
        if not 0.0 < share <= 1.0:
            raise ConfigError(f"a share of the sessions is above 0 and at most 1, not {share}")
        self.share, self._seed = share, seed
        self._most = int(share * (1 << 8 * _HASH_NBYTES))
        self.num_left = 0
        """Sessions, or requests where the trace does not tell them."""
        self.tokens_left = 0

    def takes(self, name: str) -> bool:
        """Whether the session of this name is in it."""
        text = f"{self._seed}/{name}".encode("utf-8", "surrogatepass")
        return int.from_bytes(blake2b(text, digest_size=_HASH_NBYTES).digest()) < self._most

    def leave(self, num_tokens: int) -> None:
        """Count one that is not, of prompts with so many tokens in all."""
        self.num_left += 1
        self.tokens_left += num_tokens

    def of(self, sessions: Iterable[Session]) -> Iterator[Session]:
        """The sessions, with an empty one for each that is left."""
        for session in sessions:
            if session and not self.takes(session[0].session):
                self.leave(sum(map(_num_tokens, session)))
                yield []
            else:
                yield session


def _num_tokens(request: TracedRequest) -> int:
    """Of its prompt."""
    return sum(count for _, count in request.pieces)


class Untold:
    """The sessions of a trace that does not tell them, and what a sample takes of it."""

    def __init__(self, sample: Sample, before: Iterable[Session], piece_size: int) -> None:
        """`before`: the whole trace, for a first look; its blocks have `piece_size` tokens."""
        self._sample, self._piece_size = sample, piece_size
        self._common = _common(self._some(before))
        self._numbers: dict[str, int] = {}
        self.numbers = array("q")
        """Of each request that was taken: that of its session."""

    def taken(self, session: Session) -> Session:
        """The requests that are in the sample."""
        found = []
        for request in session:
            name = self._name(request)
            if self._sample.takes(name):
                self.numbers.append(self._numbers.setdefault(name, len(self._numbers)))
                found.append(request)
            else:
                self._sample.leave(_num_tokens(request))
        return found

    def _name(self, request: TracedRequest) -> str:
        """Of its session."""
        path = self._path(request)
        for key in path:
            if key not in self._common:
                return key
        return path[-1] if path else request.session

    def _path(self, request: TracedRequest) -> list[str]:
        """Its blocks: what is left at the end, shorter and without an id, is none."""
        whole = request.pieces
        if whole and whole[-1][1] < self._piece_size and not request.has_short_block:
            whole = whole[:-1]
        return [key for key, _ in whole]

    def _some(self, sessions: Iterable[Session]) -> list[list[str]]:
        """Paths of all requests, or of so many at even distances that they are not too long."""
        kept: list[list[str]] = []
        num_kept, every = 0, 1
        for number, session in enumerate(sessions):
            if number % every:
                continue
            paths = [self._path(request) for request in session]
            kept += paths
            num_kept += sum(map(len, paths))
            if num_kept > _MOST_LOOKED_AT and len(kept) > 1:
                kept, every = kept[::2], 2 * every
                num_kept = sum(map(len, kept))
        return kept


def _common(paths: list[list[str]]) -> frozenset[str]:
    """Blocks that many different ones follow, and those before them."""
    children: dict[str, set[str]] = {}
    for path in paths:
        for above, below in pairwise(path):
            children.setdefault(above, set()).add(below)
    common: set[str] = set()
    for path in paths:
        depth = len(path)
        while depth and len(children.get(path[depth - 1], ())) <= MANY_CHILDREN:
            depth -= 1
        common.update(path[:depth])
    return frozenset(common)
