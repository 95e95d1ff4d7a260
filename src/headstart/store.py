"""The store: tiers and transfers put together into one prefix cache.

`lookup` asks how much of a prompt is held, `load` brings it into memory and pins it (a `Lease`),
`store` and `reserve` take new blocks. A store lands in memory at once and is written behind to
every lower tier; a load takes the prefix that memory holds in place and promotes the rest:

    load   [0, m)  pinned in the arena      [m, n)  read from a tier into new slots, verified,
                                                    published in the memory tier, pinned
    store  engine fills reserved slots -> published in memory -> queued for the lower tiers

Whatever a medium does (damage, errors, no room, no time) makes a lease shorter or a store a no-op.
It is never an exception, and never a wrong block.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headstart.arena import Arena
from headstart.errors import ClosedError
from headstart.keys import Namespace
from headstart.lease import Lease, Promotion, Reservation, SharedHold
from headstart.tiers.base import Batch, Progress, Tier
from headstart.tiers.memory import MemoryTier, copy
from headstart.transfer import Ticket, Transfer
from headstart.types import KeyChain, NamespaceId, Outcome, TierStats, VerifyReport

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)
_ASK_EVERY_S = 0.005

GoOn = Callable[[int, str], bool]
"""Called with the blocks ready so far and the tier that gives more; whether to go on waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """How much of a chain is held: a hint, since blocks may go before they are loaded."""

    num_blocks: int
    """Blocks at the start of the chain that some tier holds."""
    by_tier: dict[str, int]
    """The same for each tier, memory first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counters since the store was opened."""

    tiers: dict[str, TierStats]
    """By tier name, memory first."""
    num_loads: int
    num_late: int
    """Loads that ran out of time and gave what was ready."""
    num_writes_skipped: int
    """Blocks not written to a lower tier because its queue was full."""
    queued_nbytes: int
    """Blocks waiting to be written, in bytes."""


@dataclass(frozen=True, slots=True)
class _Lower:
    """A tier below memory and the threads that drive it."""

    tier: Tier
    transfer: Transfer


class PrefixStore:
    """A prefix cache over a memory tier and any number of lower tiers. Thread-safe.

    Make one with `headstart.open_store`. It owns its tiers and transfers and closes them.
    """

    def __init__(
        self,
        memory: MemoryTier,
        lower: Sequence[tuple[Tier, Transfer]] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lower` in order of preference, fastest first. `clock` in seconds, monotonic."""
        self._clock = clock
        self._memory = memory
        self._lower = [_Lower(tier, transfer) for tier, transfer in lower]
        self._counts = {"num_loads": 0, "num_late": 0, "num_writes_skipped": 0}
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def lower(self) -> list[tuple[Tier, Transfer]]:
        """The tiers below memory, in order of preference, and the threads that drive each."""
        return [(lower.tier, lower.transfer) for lower in self._lower]

    @property
    def arena(self) -> Arena:
        """The memory that leases and reservations lie in, at their `offsets`."""
        return self._memory.arena

    def open_namespace(self, namespace: Namespace) -> None:
        """Make a namespace known to every tier; do so before anything else with its blocks.

        Idempotent. Raises ConfigError when a tier could not hold even one of its blocks.
        """
        self._check_open()
        # Memory last: what it does not know is not loaded or stored.
        for tier in reversed(self._all_tiers()):
            tier.open_namespace(namespace)

    def lookup(self, chain: KeyChain) -> Lookup:
        """How many blocks at the start of `chain` are held, by tier. Reads nothing, counts nothing.

        `chain` starts its prompt: a run from the middle of one is looked up as it stands.
        """
        self._check_open()
        by_tier = {tier.name: tier.lookup(chain.keys) for tier in self._all_tiers()}
        return Lookup(num_blocks=max(by_tier.values()), by_tier=by_tier)

    def load(
        self,
        chain: KeyChain,
        *,
        timeout_s: float | None = None,
        go_on: GoOn | None = None,
        may_read: Callable[[str], bool] = lambda tier: True,
        deadline: Callable[[], float] = lambda: math.inf,
    ) -> Lease:
        """Bring the longest held prefix of `chain` into memory and pin it there.

        Blocks until all of it is read and verified, or for `timeout_s`, or until `go_on`, which is
        asked every few milliseconds meanwhile, says no; then the lease holds what is ready. Its
        blocks are pinned, in memory, until it is closed: use it as a context manager. A tier that
        `may_read` denies by its name is passed over. Reads with an earlier `deadline`, which may
        become earlier meanwhile, go first.
        """
        self._check_open()
        started = self._clock()
        memory = self._memory
        rows = self._pin(chain)
        offsets = [memory.index.rows.offset[row] for row in rows]
        lease = Lease(memory=memory, chain=chain, rows=rows, offsets=offsets, by_tier={})
        num_here = lease.by_tier[memory.name] = len(rows)
        try:
            for lower in self._lower:
                held = lower.tier.lookup(chain.keys)
                is_wanted = held > lease.ready_blocks and not lease.late
                if is_wanted and may_read(lower.tier.name):
                    left_s = None if timeout_s is None else timeout_s - (self._clock() - started)
                    self._promote(lower, lease, held, left_s, go_on, deadline)
                else:
                    lower.tier.touch(chain.keys[:held])
                if held < num_here:
                    self._write_behind(lower, chain.run(held, num_here), rows[held:num_here])
        except BaseException:
            lease.close()
            raise
        self._count(num_loads=1, num_late=int(lease.late))
        memory.counters.add(num_hits=num_here, num_misses=len(chain) - num_here)
        lease.seconds = self._clock() - started
        return lease

    def reserve(self, chain: KeyChain) -> Reservation:
        """Slots in memory for new blocks, to be filled in place and committed.

        The reservation has views for the first blocks of `chain`, fewer than it has blocks when
        memory is full. Leaving its `with` without `commit()` gives the slots back.
        """
        self._check_open()
        return Reservation(memory=self._memory, chain=chain, accept=self._accept)

    def store(self, chain: KeyChain, blocks: Sequence[Buffer]) -> list[Outcome]:
        """Store blocks by copying them: `blocks[i]`, `block_nbytes` long, is `chain.keys[i]`.

        Returns one outcome a block: DONE (accepted, or held already), ORPHAN (the parent of the
        first block is not held) or FULL. Raises ValueError for a wrong number or length of blocks.
        """
        if len(blocks) != len(chain):
            raise ValueError(f"{len(chain)} keys need as many blocks, not {len(blocks)}")
        sources = [memoryview(block).cast("B") for block in blocks]
        if any(len(source) != chain.block_nbytes for source in sources):
            raise ValueError(f"every block must be {chain.block_nbytes} bytes long")
        self._check_open()
        held = self._memory.lookup(chain.keys)
        self._memory.touch(chain.keys[:held])
        with self.reserve(chain.run(held, len(chain))) as reservation:
            for view, source in zip(reservation.views, sources[held:], strict=False):
                copy(view, source, chain.block_nbytes)
            return [Outcome.DONE] * held + reservation.commit()

    def discard(self, chain: KeyChain) -> int:
        """Forget blocks and everything below them in every tier; returns the most any tier forgot.

        Leased blocks stay readable until their lease is closed. Blocks still queued for a lower
        tier may be written afterwards: call `flush()` before, if that matters.
        """
        self._check_open()
        return max(tier.discard(chain.keys) for tier in self._all_tiers())

    def usage(self) -> dict[str, dict[NamespaceId, int]]:
        """For each tier the namespaces that it knows and the bytes that each holds."""
        self._check_open()
        return {tier.name: tier.usage() for tier in self._all_tiers()}

    def discard_namespace(self, namespace: NamespaceId) -> int:
        """Forget every block of a namespace in every tier; returns the most any tier forgot."""
        self._check_open()
        return max(
            tier.discard_namespace(namespace) if namespace in tier.usage() else 0
            for tier in self._all_tiers()
        )

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every accepted block is written and would survive `kill -9` of this process.

        False when the time was up before, or a tier could not write it down.
        """
        self._check_open()
        deadline = None if timeout_s is None else self._clock() + timeout_s
        for lower in self._lower:
            left_s = None if deadline is None else max(0.0, deadline - self._clock())
            if not lower.transfer.drain(left_s) or not lower.tier.flush():
                return False
        return True

    def verify(self, progress: Progress | None = None) -> list[VerifyReport]:
        """Read every block of every tier, drop what is damaged, report; one report a tier."""
        self._check_open()
        return [tier.verify(progress) for tier in self._all_tiers()]

    def stats(self) -> StoreStats:
        """Counters since the store was opened, and its present fill."""
        with self._lock:
            counts = dict(self._counts)
        return StoreStats(
            tiers={tier.name: tier.stats() for tier in self._all_tiers()},
            queued_nbytes=sum(lower.transfer.queued_nbytes for lower in self._lower),
            **counts,
        )

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what is queued, for at most `timeout_s`, then release everything. Idempotent.

        Views of leases that are still open stay readable; their memory goes with the last of them.
        A tier whose device does not return stays open, and its directory locked, until the process
        ends: closing its files would give their descriptors to others under a running transfer.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if os.getpid() != self._pid:
            return  # a fork's copy: memory, files and lock are the other process's
        deadline = self._clock() + timeout_s
        for lower in self._lower:
            lower.transfer.drain(max(0.0, deadline - self._clock()))
            if lower.transfer.close(max(1.0, deadline - self._clock())):
                lower.tier.close()
            else:
                _log.warning("tier %s does not return; it is left open", lower.tier.name)
        self._memory.close()

    def _all_tiers(self) -> list[Tier]:
        return [self._memory, *(lower.tier for lower in self._lower)]

    def _pin(self, chain: KeyChain, *, is_use: bool = True) -> list[int]:
        return self._memory.index.pin(
            chain.keys,
            namespace=self._memory.namespaces[chain.namespace],
            block_nbytes=chain.block_nbytes,
            is_use=is_use,
        )

    def _promote(
        self,
        lower: _Lower,
        lease: Lease,
        held: int,
        timeout_s: float | None,
        go_on: GoOn | None,
        deadline: Callable[[], float],
    ) -> None:
        """Extend a lease to block `held` by reading from a lower tier."""
        memory, chain = self._memory, lease.chain
        started = self._clock()
        slots = memory.index.reserve(chain.block_nbytes, held - lease.ready_blocks)
        if not slots:
            return
        wanted = chain.run(lease.ready_blocks, lease.ready_blocks + len(slots))
        promotion = Promotion(memory=memory, chain=wanted, slots=slots)
        views = [memory.view(slot, chain.block_nbytes) for slot in slots]
        batch = lower.tier.begin_read(wanted, views)
        nbytes = len(wanted) * chain.block_nbytes
        ticket = lower.transfer.read(batch, promotion.finished, nbytes=nbytes, deadline=deadline())
        try:
            above, name = lease.ready_blocks, lower.tier.name

            def ask(ready: int) -> bool:
                ticket.hurry(deadline())
                return go_on is None or go_on(above + ready, name)

            in_time = _wait(ticket, timeout_s, None if go_on is None else ask, self._clock)
        except BaseException:  # Ctrl-C while a device is waited for
            ticket.cancel()
            promotion.abandon()
            raise
        if not in_time:
            ticket.cancel()
        before = lease.ready_blocks
        lease.extend(promotion, ready=ticket.ready_blocks(), late=not in_time)
        lease.by_tier[lower.tier.name] = lease.ready_blocks - before
        lease.read_s += self._clock() - started

    def _accept(self, chain: KeyChain, views: list[memoryview], hold: SharedHold) -> bool:
        """Queue new blocks for every lower tier; whether at least one took them."""
        accepted = [
            self._queue_write(lower, chain, views, hold)
            for lower in self._lower
            # Its parent may be on its way, in a write that is queued before this one.
            if chain.parent is None
            or lower.transfer.queued_nbytes
            or lower.tier.lookup((chain.parent,))
        ]
        return any(accepted)

    def _write_behind(self, lower: _Lower, chain: KeyChain, rows: list[int]) -> None:
        """Write blocks that memory holds and a lower tier lost or never got."""
        memory = self._memory
        pinned = self._pin(chain, is_use=False)
        hold = SharedHold(lambda: memory.index.unpin(pinned))
        if pinned == rows:
            offsets = memory.index.rows.offset
            views = [memory.view(offsets[row], chain.block_nbytes) for row in rows]
            self._queue_write(lower, chain, views, hold)
        hold.release()

    def _queue_write(
        self, lower: _Lower, chain: KeyChain, views: list[memoryview], hold: SharedHold
    ) -> bool:
        hold.acquire()

        def decide() -> Batch:
            return lower.tier.begin_write(chain, views)

        def done(_: list[Outcome]) -> None:
            hold.release()

        nbytes = len(chain) * chain.block_nbytes
        if lower.transfer.write(decide, nbytes=nbytes, on_done=done):
            return True
        hold.release()
        self._count(num_writes_skipped=len(chain))
        return False

    def _count(self, **numbers: int) -> None:
        with self._lock:
            for name, number in numbers.items():
                self._counts[name] += number

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                "the store belongs to the process that opened it; open one after fork"
            )
        if self._closed:
            raise ClosedError("the store is closed")


def _wait(
    ticket: Ticket,
    timeout_s: float | None,
    go_on: Callable[[int], bool] | None,
    clock: Callable[[], float],
) -> bool:
    """Wait for a read; False when it was given up. `go_on` gets the blocks that are ready."""
    if go_on is None:
        return ticket.wait(timeout_s)
    deadline = None if timeout_s is None else clock() + timeout_s
    while go_on(ticket.ready_blocks()):
        left_s = _ASK_EVERY_S if deadline is None else min(_ASK_EVERY_S, deadline - clock())
        if ticket.wait(max(0.0, left_s)):
            return True
        if deadline is not None and clock() >= deadline:
            return False
    return ticket.wait(0)
