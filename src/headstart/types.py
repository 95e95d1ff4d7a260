"""Frozen values that every layer shares: keys, runs of keys, outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

BlockKey = NewType("BlockKey", bytes)
"""Content hash of a block, chained over its whole prefix inside a namespace; `KEY_NBYTES` long."""

NamespaceId = NewType("NamespaceId", bytes)
"""Digest of a `Namespace`; `KEY_NBYTES` long."""

KEY_NBYTES = 32
MAX_BLOCK_NBYTES = 1 << 30


class Outcome(Enum):
    """What became of one block of a batch. Everything but DONE means: recompute."""

    DONE = "done"
    """Read and verified, or written, or already held."""
    MISS = "miss"
    """Not held, or not reached before the batch was cancelled."""
    DROPPED = "dropped"
    """Was held but damaged, torn, foreign or stale: forgotten and counted."""
    FULL = "full"
    """No room: everything that could be evicted is pinned, or a queue is full."""
    ORPHAN = "orphan"
    """Refused: the parent block is not held, so nothing could ever reach this one."""
    FAILED = "failed"
    """The medium reported an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChain:
    """Consecutive blocks of one prompt, in prompt order.

    `keys[0]` continues `parent`, or starts the prompt where `parent` is None. Every key is in
    `namespace`, every block is `block_nbytes` long.
    """

    namespace: NamespaceId
    block_nbytes: int
    keys: tuple[BlockKey, ...]
    parent: BlockKey | None = None

    def __post_init__(self) -> None:
        # Keys of one length are what the index and the block format are built on.
        fixed = {len(self.namespace), *map(len, self.keys), len(self.parent or self.namespace)}
        if fixed != {KEY_NBYTES}:
            raise ValueError(f"namespace, keys and parent must be {KEY_NBYTES} bytes long")
        if not 1 <= self.block_nbytes <= MAX_BLOCK_NBYTES:
            raise ValueError(f"block_nbytes must be in [1, {MAX_BLOCK_NBYTES}]")

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self.keys)

    def run(self, start: int, stop: int) -> KeyChain:
        """Blocks `[start, stop)` of this chain, as a chain of their own."""
        if not 0 <= start <= stop <= len(self.keys):
            raise ValueError(f"run [{start}, {stop}) is outside [0, {len(self.keys)})")
        return KeyChain(
            namespace=self.namespace,
            block_nbytes=self.block_nbytes,
            keys=self.keys[start:stop],
            parent=self.keys[start - 1] if start else self.parent,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Counters of one tier since it was opened, and its present fill. Sizes in bytes."""

    name: str
    capacity_nbytes: int
    used_nbytes: int
    num_blocks: int
    num_hits: int = 0
    num_misses: int = 0
    num_stored: int = 0
    num_evicted: int = 0
    num_discarded: int = 0
    num_dropped: int = 0
    num_refused: int = 0
    num_failed: int = 0
    read_nbytes: int = 0
    written_nbytes: int = 0
    damage: Mapping[str, int] = field(default_factory=dict)
    """Blocks found damaged, by cause; `num_dropped` counts those below them as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What reading every block of a tier found."""

    tier: str
    num_blocks: int
    num_damaged: int
    num_failed: int
    read_nbytes: int
    seconds: float

    @property
    def good(self) -> bool:
        """True when every block was read and proved intact."""
        return self.num_damaged == 0 and self.num_failed == 0
