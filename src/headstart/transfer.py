"""The only threads: they run the batches that tiers decide, bounded by bytes in flight.

One `Transfer` drives one device. Beyond the bytes a device needs in flight to be busy, more only
make every read wait longer (4 MiB reads: 3 ms alone, 28 ms eight at a time, at one bandwidth), so
the bound is on bytes, not on requests, and is measured per device by `headstart.inflight`.

Two lanes. Reads are taken by deadline, then in order of arrival, several batches at once: an urgent
one goes before the blocks of others that are not in flight yet. Writes run one batch at a time,
since a block may only be published after its parent; each is decided when its turn comes, and goes
on only while no read waits to be started: no read waits for more of it than the blocks in flight.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from headstart.tiers.base import Batch
from headstart.types import Outcome

_log = logging.getLogger(__name__)
DEFAULT_INFLIGHT_NBYTES = 16 << 20
OnDone = Callable[[list[Outcome]], None]
_Write = tuple[Callable[[], Batch], int, OnDone | None]  # how to make it, its bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSample:
    """What a read took, for those who learn from it."""

    nbytes: int
    """That the device gave meanwhile, to this read and to those it waited for or ran beside."""
    seconds: float
    """From its acceptance to its end."""
    is_good: bool
    """Whether the medium failed no block."""


class Ticket:
    """A batch that was handed to the threads."""

    def __init__(self, batch: Batch, on_done: OnDone | None, nbytes: int = 0) -> None:
        self._batch, self._nbytes = batch, nbytes
        self.deadline = math.inf
        self._moved_before = self._counted_nbytes = 0
        self._accepted_at: float | None = None
        self._on_done = on_done
        self._next = count().__next__
        self._length = len(batch)
        self._done = threading.Event()
        self._num_workers = 0  # guarded by the transfer's lock, as is the next
        self._exhausted = False  # every index was handed out
        self._move: Callable[[Ticket, float], None] = lambda ticket, deadline: None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the batch is finished and published; False when the time was up before."""
        return self._done.wait(_wait_bound(timeout_s))

    def ready_blocks(self) -> int:
        """See `Batch.ready_blocks`."""
        return self._batch.ready_blocks()

    def cancel(self) -> None:
        """Start no further index. Those that run keep their memory until they return."""
        self._length = 0
        self._move(self, -math.inf)  # nothing is left to wait for: it ends at once

    def hurry(self, deadline: float) -> None:
        """It has become more urgent."""
        if deadline < self.deadline:
            self._move(self, deadline)

    def _run(
        self,
        reads: list[Ticket],
        exhaust: Callable[[Ticket], None],
        moved: Callable[[Ticket], None],
    ) -> None:
        """Run indices until none is left, or until one of the `reads` goes first.

        `exhaust(self)` is called with the last index, before it is run, `moved(self)` after each.
        """
        run = self._batch.run
        while True:
            # Without the lock: it is looked at again before the next block.
            first = reads[:1]
            if first and first[0] is not self and not self._exhausted:
                return
            index = self._next()
            if index >= self._length - 1:
                exhaust(self)
                if index >= self._length:
                    return
            run(index)
            moved(self)

    def _finish(self) -> None:
        """Tell everybody, whatever the tier does."""
        outcomes: list[Outcome] = []
        try:
            outcomes = self._batch.finish()
        finally:
            try:
                if self._on_done is not None:
                    self._on_done(outcomes)
            finally:
                self._done.set()


class Transfer:
    """Threads for one device. `close()` waits for what is running and refuses the rest."""

    def __init__(
        self,
        name: str,
        *,
        num_threads: int = 24,
        inflight_nbytes: int = DEFAULT_INFLIGHT_NBYTES,
        max_queued_nbytes: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_queued_nbytes` bounds the writes that wait; beyond it they are refused."""
        self.inflight_nbytes = inflight_nbytes
        self.wanted_nbytes = inflight_nbytes
        """At its present speed: more would only come later, all at once."""
        self.on_read: Callable[[ReadSample], None] | None = None
        """Told of every read when it is over, on one of the threads; must not block."""
        self._clock = clock
        self._moved_nbytes = 0
        self._moved_at = 0.0
        self._max_queued_nbytes = max_queued_nbytes
        self._reads: list[Ticket] = []
        """By deadline, then in order of arrival."""
        self._unfinished: set[Ticket] = set()
        """Reads that are accepted and not over."""
        self._writes: deque[_Write] = deque()
        self._write: Ticket | None = None
        self._deciding = False  # a worker is making the next write's batch
        self._queued_nbytes = 0
        self._num_accepted = self._num_finished = 0  # writes
        self._running_nbytes = 0
        self._closing = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for the threads
        self._written = threading.Condition(self._lock)  # for those who wait for writes
        self._threads = [
            threading.Thread(target=self._work, name=f"headstart-{name}-{n}", daemon=True)
            for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queued_nbytes(self) -> int:
        """Bytes of writes that are accepted and not finished."""
        return self._queued_nbytes

    @property
    def reading_nbytes(self) -> int:
        """Bytes of reads that are accepted and not over."""
        with self._lock:
            return sum(ticket._nbytes for ticket in self._unfinished)

    def num_at_once(self, item_nbytes: int) -> int:
        """Items of this size in flight: two more than the device needs, which are verified."""
        return min(len(self._threads), self.wanted_nbytes // max(1, item_nbytes) + 2)

    def ahead_nbytes(self, deadline: float) -> int:
        """Bytes still to be read before a read with this deadline."""
        with self._lock:
            return sum(
                max(0, ticket._nbytes - ticket._counted_nbytes)
                for ticket in self._unfinished
                if ticket._length and ticket.deadline <= deadline
            )

    def unmoved_s(self) -> float:
        """Seconds since the device last gave anything that is waited for; 0 when nothing is."""
        with self._lock:
            return max(0.0, self._clock() - self._moved_at) if self._unfinished else 0.0

    def read(
        self,
        batch: Batch,
        on_done: OnDone | None = None,
        *,
        nbytes: int = 0,
        deadline: float = math.inf,
    ) -> Ticket:
        """Run a batch of blocks of `nbytes` in all, as soon as threads are free.

        It goes before those whose `deadline` is later, by any clock that all of them use. `on_done`
        is called on one of the threads, once. Its outcomes are none when the batch could not be
        finished, which is a bug of its tier.
        """

        def over(outcomes: list[Outcome]) -> None:
            try:
                self._read_over(ticket, outcomes)
            finally:
                if on_done is not None:
                    on_done(outcomes)

        ticket = Ticket(batch, over, nbytes)
        ticket.deadline = deadline
        with self._lock:
            if len(batch) and not self._closing:
                ticket._move = self._moved_up
                ticket._accepted_at, ticket._moved_before = self._clock(), self._moved_nbytes
                if not self._unfinished:
                    self._moved_at = ticket._accepted_at
                self._unfinished.add(ticket)
                insort(self._reads, ticket, key=lambda each: each.deadline)
                self._changed.notify(self.num_at_once(batch.item_nbytes))
                return ticket
        ticket._finish()
        return ticket

    def write(
        self, decide: Callable[[], Batch], *, nbytes: int, on_done: OnDone | None = None
    ) -> bool:
        """Queue a write; `decide` makes its batch when its turn comes. False: the queue is full.

        After True, `on_done` is called exactly once, with no outcomes if the write never ran.
        """
        with self._lock:
            if self._closing or (
                self._queued_nbytes and self._queued_nbytes + nbytes > self._max_queued_nbytes
            ):
                return False
            self._queued_nbytes += nbytes
            self._num_accepted += 1
            self._writes.append((decide, nbytes, on_done))
            self._changed.notify()
        return True

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait for the writes accepted so far; False when the time was up before."""
        with self._lock:
            last = self._num_accepted  # not later ones: others may store without end
            return self._written.wait_for(
                lambda: self._num_finished >= last, _wait_bound(timeout_s)
            )

    def close(self, timeout_s: float = 30.0) -> bool:
        """Finish what is running, give up what is queued. False when a device did not return."""
        with self._lock:
            self._closing = True
            abandoned, self._writes = list(self._writes), deque()
            self._queued_nbytes -= sum(nbytes for _, nbytes, _ in abandoned)
            self._num_finished += len(abandoned)
            for ticket in self._reads:
                ticket._length = 0
            if self._write is not None:
                self._write._length = 0
            self._changed.notify_all()
            self._written.notify_all()
        for _, _, on_done in abandoned:
            if on_done is not None:
                on_done([])
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (task := self._wait_for_task()) is not None:
            if isinstance(task, Ticket):
                self._drive(task)
            else:
                self._decide(*task)

    def _wait_for_task(self) -> Ticket | _Write | None:
        """A batch to help with, or a write to decide; None when the transfer is closed."""
        with self._lock:
            while True:
                if (ticket := self._pick()) is not None:
                    self._changed.notify()  # there may be room for one more
                    return ticket
                if self._writes and self._write is None and not self._deciding:
                    self._deciding = True
                    return self._writes.popleft()
                if self._closing and not self._reads and self._write is None:
                    self._changed.notify_all()
                    return None
                self._changed.wait()

    def _pick(self) -> Ticket | None:
        """A ticket with work for one more thread, counted as running."""
        ticket = self._reads[0] if self._reads else self._write
        nbytes = 0 if ticket is None else ticket._batch.item_nbytes
        is_full = self._running_nbytes > self.wanted_nbytes + nbytes
        if ticket is None or ticket._exhausted or is_full:
            return None
        ticket._num_workers += 1
        self._running_nbytes += nbytes
        return ticket

    def _exhaust(self, ticket: Ticket) -> None:
        """Every index of the ticket is handed out: the next one's turn."""
        with self._lock:
            if not ticket._exhausted:
                ticket._exhausted = True
                if ticket is not self._write:
                    self._reads.remove(ticket)
                self._changed.notify()

    def _moved_up(self, ticket: Ticket, deadline: float) -> None:
        """A read has become more urgent than it was."""
        with self._lock:
            ticket.deadline = deadline
            if ticket in self._reads:
                self._reads.remove(ticket)
                insort(self._reads, ticket, key=lambda each: each.deadline)
                self._changed.notify()

    def _moved(self, ticket: Ticket) -> None:
        """One more index was run."""
        if ticket is not self._write:
            nbytes = ticket._nbytes // len(ticket._batch)
            with self._lock:
                self._moved_nbytes += nbytes
                ticket._counted_nbytes += nbytes
                self._moved_at = self._clock()

    def _read_over(self, ticket: Ticket, outcomes: list[Outcome]) -> None:
        if ticket._accepted_at is None:
            return  # nothing to do, or refused
        # Blocks that were gone, or that the medium failed, were no bytes.
        nbytes = ticket._nbytes * outcomes.count(Outcome.DONE) // max(1, len(outcomes))
        with self._lock:
            self._unfinished.discard(ticket)
            self._moved_nbytes += nbytes - ticket._counted_nbytes
            # What others are corrected by meanwhile may be more than this one read.
            moved_nbytes = max(nbytes, self._moved_nbytes - ticket._moved_before)
        if self.on_read is not None and ticket._nbytes:
            sample = ReadSample(
                nbytes=moved_nbytes,
                seconds=self._clock() - ticket._accepted_at,
                is_good=Outcome.FAILED not in outcomes and bool(outcomes),
            )
            self.on_read(sample)

    def _decide(self, decide: Callable[[], Batch], nbytes: int, on_done: OnDone | None) -> None:
        def finished(outcomes: list[Outcome]) -> None:
            try:
                if on_done is not None:
                    on_done(outcomes)
            finally:
                with self._lock:
                    self._write, self._deciding = None, False
                    self._queued_nbytes -= nbytes
                    self._num_finished += 1
                    self._changed.notify_all()
                    self._written.notify_all()

        try:
            ticket = Ticket(decide(), finished)
        except Exception:  # noqa: BLE001 - a thread's top: a bug costs blocks, not the thread
            _log.exception("a write could not be decided; its blocks are skipped")
            finished([])
            return
        if ticket._length == 0:
            _finish(ticket)
            return
        with self._lock:
            self._write, self._deciding = ticket, False
            self._changed.notify(2)

    def _drive(self, ticket: Ticket) -> None:
        try:
            ticket._run(self._reads, self._exhaust, self._moved)
        except Exception:  # noqa: BLE001 - a thread's top: a bug costs a miss, not the thread
            _log.exception("a block transfer failed unexpectedly")
            self._exhaust(ticket)
        with self._lock:
            self._running_nbytes -= ticket._batch.item_nbytes
            ticket._num_workers -= 1
            last = ticket._exhausted and ticket._num_workers == 0
            self._changed.notify()
        if last:
            _finish(ticket)


def _wait_bound(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)


def _finish(ticket: Ticket) -> None:
    try:
        ticket._finish()
    except Exception:  # noqa: BLE001 - a thread's top: a bug costs a miss, not the thread
        _log.exception("a batch could not be finished")
