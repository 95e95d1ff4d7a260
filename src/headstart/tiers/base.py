"""The seam between the store and a medium: two small protocols, `Tier` and `Batch`.

A tier decides and keeps books; it never starts threads. Reading or writing a chain of blocks is

    batch = tier.begin_read(chain, targets)     # decides, pins; no I/O
    for index in range(len(batch)):             # any order, any threads, each index at most once
        batch.run(index)                        # one blocking I/O, verified
    outcomes = batch.finish()                   # publishes or drops, unpins; exactly once

so that one pair of threads, in `headstart.transfer`, drives every medium. An index that was not
run counts as a miss. `read` and `write` below do all three steps on the caller's thread.

The contract, which `headstart.testing.TierContract` checks:

- **A tier may forget, it must never lie.** After DONE from a read, the target holds exactly the
  bytes that were written under that key in that namespace, and nothing else.
- Targets and sources belong to the caller; a tier keeps no reference after `finish()`. They start
  at a page boundary and are `align_up(block_nbytes)` long (an arena slot), so that direct I/O needs
  no copy. The bytes past `block_nbytes` are undefined.
- A target whose outcome is not DONE may hold anything.
- `keys` and chains are runs of one prompt, in its order. A namespace that is not open is refused by
  ConfigError, a wrong number or length of buffers by ValueError.
- Prefixes are closed: a block is held only while its parent is. A write whose parent is not held is
  ORPHAN, eviction takes leaves first, discarding a block discards its descendants.
- No method raises for what a medium does (damage, errors, no room): that is an `Outcome`.
  After `close()` every method but `close()` raises ClosedError; batches are finished before it.
- A batch that is open while its blocks are discarded keeps its memory; a write of them may still be
  published afterwards.
- All methods may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from headstart.keys import Namespace
from headstart.types import BlockKey, KeyChain, NamespaceId, Outcome, TierStats, VerifyReport

Progress = Callable[[int, int], None]
"""Called with (blocks done, blocks in all)."""


class Batch(Protocol):
    """Decided but unfinished work on a chain of blocks."""

    @property
    def item_nbytes(self) -> int:
        """Bytes that one `run()` moves; what a bound on bytes in flight counts."""

    def __len__(self) -> int:
        """Number of indices to run."""

    def run(self, index: int) -> None:
        """Do one blocking I/O. Never raises for what the medium does."""

    def ready_blocks(self) -> int:
        """Blocks at the start of the chain that are read and verified (or written) by now."""

    def finish(self) -> list[Outcome]:
        """End the batch: one outcome a block of the chain, in its order. Call it once, last."""


@runtime_checkable
class Tier(Protocol):
    """One medium that holds blocks."""

    @property
    def name(self) -> str:
        """Short name for statistics and reports, such as "memory" or "file"."""

    def open_namespace(self, namespace: Namespace) -> None:
        """Make a namespace known, which every chain given to this tier must be. Idempotent.

        Raises ConfigError when not even one block of it fits the tier's capacity.
        """

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Number of blocks at the start of `keys` that are held. A hint: `begin_read` decides."""

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Count a use of the prefix of `keys` that is held, so that it is not evicted as unused.

        For blocks that a faster tier served in this one's stead. Does nothing where a medium
        evicts by rules of its own.
        """

    def begin_read(self, chain: KeyChain, targets: Sequence[memoryview]) -> Batch:
        """Decide a read of the blocks of `chain` into `targets`, one each."""

    def begin_write(self, chain: KeyChain, sources: Sequence[memoryview]) -> Batch:
        """Decide a write of the blocks of `chain` from `sources`, one each; evicts for room."""

    def discard(self, keys: Sequence[BlockKey]) -> int:
        """Forget these blocks and their descendants. Returns how many blocks were forgotten."""

    def discard_namespace(self, namespace: NamespaceId) -> int:
        """Forget every block of a namespace. Returns how many."""

    def usage(self) -> dict[NamespaceId, int]:
        """Every known namespace, of this process or an earlier one, and the bytes it holds."""

    def stats(self) -> TierStats:
        """Counters since the tier was opened."""

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Read every block, drop what is damaged, report."""

    def flush(self) -> bool:
        """Whether everything written so far would survive `kill -9` of this process."""

    def close(self) -> None:
        """Release the medium. Idempotent."""


@runtime_checkable
class Sampled(Protocol):
    """A tier whose speed can be measured before anybody asks for a block of it."""

    def sample(self) -> KeyChain | None:
        """Some held block of an open namespace, as a chain of one; None when there is none."""

    def begin_probe(self, chain: KeyChain, targets: Sequence[memoryview]) -> Batch:
        """As `Tier.begin_read`, but nobody's use of the blocks: no hit, and they stay as old."""


def read(tier: Tier, chain: KeyChain, targets: Sequence[memoryview]) -> list[Outcome]:
    """Read `chain` into `targets` on this thread, one outcome a block."""
    return run_inline(tier.begin_read(chain, targets))


def write(tier: Tier, chain: KeyChain, sources: Sequence[memoryview]) -> list[Outcome]:
    """Write `chain` from `sources` on this thread, one outcome a block."""
    return run_inline(tier.begin_write(chain, sources))


def run_inline(batch: Batch) -> list[Outcome]:
    """Run a whole batch on this thread."""
    for index in range(len(batch)):
        batch.run(index)
    return batch.finish()
