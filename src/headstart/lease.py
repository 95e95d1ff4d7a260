"""Scopes in which memory belongs to somebody: leases, reservations, promotions.

Who owns a slot of the arena, from left to right in time:

    load     reserved by a Promotion --read--> published, pinned for the Lease --close--> unpinned
    late     reserved by a Promotion, lent to the Lease --read and close--> published, unpinned
    store    reserved by a Reservation --commit--> published, pinned while writes are queued
    staged   the same, but the parent is not in memory: stays reserved until written, then released
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headstart.errors import ClosedError
from headstart.slots import Slot
from headstart.tiers.memory import MemoryTier
from headstart.types import KeyChain, Outcome

Accept = Callable[[KeyChain, list[memoryview], "SharedHold"], bool]
"""Takes blocks for writing while it holds the `SharedHold`; whether anybody took them."""


class SharedHold:
    """Runs `give_back` when its last holder releases it. Made with one holder. Thread-safe."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back = give_back
        self._num_holders = 1
        self._lock = threading.Lock()

    def acquire(self) -> None:
        """One more holder."""
        with self._lock:
            self._num_holders += 1

    def release(self) -> None:
        """One holder less."""
        with self._lock:
            self._num_holders -= 1
            last = self._num_holders == 0
        if last:
            self._give_back()


class Promotion:
    """Blocks on their way from a lower tier into reserved slots of the memory tier.

    They are published when the read is over, or, if a late lease borrowed the slots, when that
    lease is closed too: publishing could free a slot whose block another load brought in meanwhile.
    """

    def __init__(self, *, memory: MemoryTier, chain: KeyChain, slots: Sequence[Slot]) -> None:
        self._memory, self._chain, self._slots = memory, chain, slots
        self._outcomes: list[Outcome] | None = None
        self._rows: list[int] = []
        self._lent = False
        self._awaited = True  # somebody will take() the rows
        self._lock = threading.Lock()

    def finished(self, outcomes: list[Outcome]) -> None:
        """The read is over. Called once, on a transfer thread; without outcomes it failed."""
        with self._lock:
            self._outcomes = outcomes or [Outcome.FAILED] * len(self._slots)
            if not self._lent:
                self._rows = self._publish(self._outcomes, pin=self._awaited)

    def take(self) -> list[int] | None:
        """The pinned rows of what was read, which now belong to the caller; None: not over yet."""
        with self._lock:
            return None if self._outcomes is None else self._rows

    def abandon(self) -> None:
        """Nobody will take the rows: they are published without a pin."""
        with self._lock:
            self._awaited = False
            rows, self._rows = self._rows, []
        self._memory.index.unpin(rows)

    def lend(self, count: int) -> list[int] | None:
        """Offsets of the first `count` slots, all read, until `give_back`; None: it is over."""
        with self._lock:
            if self._outcomes is not None:
                return None
            self._lent, self._awaited = True, False
            return [slot.offset for slot in self._slots[:count]]

    def give_back(self) -> None:
        """The borrower is done."""
        with self._lock:
            self._lent = False
            if self._outcomes is not None:
                self._publish(self._outcomes, pin=False)

    def _publish(self, outcomes: list[Outcome], *, pin: bool) -> list[int]:
        index, chain = self._memory.index, self._chain
        done = [outcome is Outcome.DONE for outcome in outcomes]
        index.release([s for s, good in zip(self._slots, done, strict=True) if not good])
        rows = index.publish(
            chain.keys,
            [s if good else None for s, good in zip(self._slots, done, strict=True)],
            parent=chain.parent,
            namespace=self._memory.namespaces[chain.namespace],
            block_nbytes=chain.block_nbytes,
            pin=pin,
        )
        leading = [row for row in rows if row is not None]
        assert all(row is not None for row in rows[: len(leading)]), (
            "a published block has no parent"
        )
        return leading


@dataclass(slots=True, eq=False)
class Lease:
    """The loaded prefix of a chain, pinned in memory until `close()`. A context manager."""

    memory: MemoryTier
    chain: KeyChain
    rows: list[int]
    offsets: list[int]
    by_tier: dict[str, int]
    """Blocks that each tier served."""
    read_s: float = 0.0
    """Seconds spent waiting for lower tiers."""
    seconds: float = 0.0
    """Seconds that the whole load took."""
    late: bool = False
    """Whether the time ran out before all held blocks were read."""
    _borrowed: list[Promotion] = field(default_factory=list)
    _closed: bool = False

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def ready_blocks(self) -> int:
        """Blocks at the start of the chain that this lease holds."""
        return len(self.offsets)

    @property
    def views(self) -> list[memoryview]:
        """Read-only memory of each ready block, `block_nbytes` long, valid until `close()`."""
        nbytes = self.chain.block_nbytes
        return [self.memory.view(offset, nbytes)[:nbytes].toreadonly() for offset in self.offsets]

    def extend(self, promotion: Promotion, *, ready: int, late: bool) -> None:
        """Take over what a promotion brought; `ready` blocks of it if it is late. For the store."""
        if late and (borrowed := promotion.lend(ready)) is not None:
            self.late = True
            self._borrowed.append(promotion)
            self.offsets += borrowed
            return
        rows = promotion.take() or []
        self.rows += rows
        self.offsets += [self.memory.index.rows.offset[row] for row in rows]

    def close(self) -> None:
        """Unpin everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.offsets = []
        self.memory.index.unpin(self.rows)
        for promotion in self._borrowed:
            promotion.give_back()


class Reservation:
    """Slots for new blocks of a chain. A context manager; nothing is stored without `commit()`."""

    def __init__(self, *, memory: MemoryTier, chain: KeyChain, accept: Accept) -> None:
        self._memory, self._chain, self._accept = memory, chain, accept
        self._namespace = memory.namespaces[chain.namespace]
        above = () if chain.parent is None else (chain.parent,)
        self._pinned = memory.index.pin(
            above, namespace=self._namespace, block_nbytes=chain.block_nbytes, is_use=False
        )
        self._slots = memory.index.reserve(chain.block_nbytes, len(chain))
        self._open = True

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Give the slots back; nothing is stored. Idempotent, and nothing after `commit()`."""
        if self._open:
            self._open = False
            self._memory.index.release(self._slots)
            self._memory.index.unpin(self._pinned)

    @property
    def offsets(self) -> list[int]:
        """Where in the arena the views lie."""
        return [slot.offset for slot in self._slots]

    @property
    def views(self) -> list[memoryview]:
        """Writable memory of the chain's first blocks, `block_nbytes` each, until `commit()`."""
        if not self._open:
            raise ClosedError("a reservation's memory is its own only until it is committed")
        nbytes = self._chain.block_nbytes
        return [self._memory.view(slot, nbytes)[:nbytes] for slot in self._slots]

    def commit(self) -> list[Outcome]:
        """Store what the views hold; one outcome a block of the chain, DONE, ORPHAN or FULL."""
        if not self._open:
            raise ClosedError("a reservation is committed once, inside its with block")
        self._open = False
        memory, index = self._memory, self._memory.index
        chain = self._chain.run(0, len(self._slots))
        full = [Outcome.FULL] * (len(self._chain) - len(chain))
        if chain.parent is not None and not self._pinned:
            return [self._stage(chain)] * len(chain) + full
        rows = index.publish(
            chain.keys,
            self._slots,
            parent=chain.parent,
            namespace=self._namespace,
            block_nbytes=chain.block_nbytes,
            pin=True,
        )
        index.unpin(self._pinned)
        pinned = [row for row in rows if row is not None]
        offsets = index.rows.offset
        views = [memory.view(offsets[row], chain.block_nbytes) for row in pinned]
        hold = SharedHold(lambda: index.unpin(pinned))
        if pinned:
            self._accept(chain.run(0, len(pinned)), views, hold)
        hold.release()
        memory.counters.add(written_nbytes=len(pinned) * chain.block_nbytes)
        return [Outcome.DONE] * len(pinned) + [Outcome.ORPHAN] * (len(chain) - len(pinned)) + full

    def _stage(self, chain: KeyChain) -> Outcome:
        """Write blocks whose parent only lower tiers can hold; memory does not publish them."""
        memory, slots = self._memory, self._slots
        hold = SharedHold(lambda: memory.index.release(slots))
        views = [memory.view(slot, chain.block_nbytes) for slot in slots]
        accepted = len(chain) > 0 and self._accept(chain, views, hold)
        hold.release()
        return Outcome.DONE if accepted else Outcome.ORPHAN
