"""The only threads: they run the batches that tiers decide, bounded by bytes in flight.

One `Transfer` drives one device. Beyond the bytes a device needs in flight to be busy, more only
make every read wait longer (measured: 4 MiB reads take 3 ms alone and 28 ms eight at a time, at
the same bandwidth), so the bound is on bytes, not on requests, and is measured per device by
`measure_inflight_nbytes`.

Two lanes. Reads are taken in order of arrival, several batches at once. Writes run one batch at a
time, in order, because a block may only be published after its parent; each is decided when its
turn comes. A write goes on only while no read waits to be started: a read never waits for more of
it than the blocks in flight. Handing out an index costs a shared counter, 1 us, and no lock.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from statistics import median

from headstart.tiers.base import Batch
from headstart.tiers.volume import Volume
from headstart.types import Outcome

_log = logging.getLogger(__name__)
DEFAULT_INFLIGHT_NBYTES = 16 << 20
OnDone = Callable[[list[Outcome]], None]
_Write = tuple[Callable[[], Batch], int, OnDone | None]  # how to make it, its bytes
_NONE: deque[Ticket] = deque()


class Ticket:
    """A batch that was handed to the threads."""

    def __init__(self, batch: Batch, on_done: OnDone | None) -> None:
        self._batch = batch
        self._on_done = on_done
        self._next = count().__next__
        self._length = len(batch)
        self._done = threading.Event()
        self._num_workers = 0  # guarded by the transfer's lock, as is the next
        self._exhausted = False  # every index was handed out

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the batch is finished and published; False when the time was up before."""
        return self._done.wait(_wait_bound(timeout_s))

    def ready_blocks(self) -> int:
        """See `Batch.ready_blocks`."""
        return self._batch.ready_blocks()

    def cancel(self) -> None:
        """Start no further index. Those that run keep their memory until they return."""
        self._length = 0

    def _run(self, first: deque[Ticket], exhaust: Callable[[Ticket], None]) -> None:
        """Run indices until none is left, or until there is a ticket that goes first.

        `exhaust(self)` is called with the last index, before it is run.
        """
        run = self._batch.run
        while not first:
            index = self._next()
            if index >= self._length - 1:
                exhaust(self)
                if index >= self._length:
                    return
            run(index)

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
    ) -> None:
        """`max_queued_nbytes` bounds the writes that wait; beyond it they are refused."""
        self.inflight_nbytes = inflight_nbytes
        self._max_queued_nbytes = max_queued_nbytes
        self._reads: deque[Ticket] = deque()
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

    def read(self, batch: Batch, on_done: OnDone | None = None) -> Ticket:
        """Run a batch as soon as threads are free. `on_done` is called on one of them, once.

        Its outcomes are none when the batch could not be finished, which is a bug of its tier.
        """
        ticket = Ticket(batch, on_done)
        if len(batch) == 0:
            ticket._finish()
            return ticket
        with self._lock:
            if self._closing:
                ticket.cancel()
            else:
                self._reads.append(ticket)
                self._changed.notify(max(2, self.inflight_nbytes // max(1, batch.item_nbytes)))
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
                ticket.cancel()
            if self._write is not None:
                self._write.cancel()
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
        if ticket is None or ticket._exhausted:
            return None
        nbytes = ticket._batch.item_nbytes
        # Two more than the device needs: they verify what they read while the others read.
        if self._running_nbytes > self.inflight_nbytes + nbytes:
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
            ticket._run(self._reads if ticket is self._write else _NONE, self._exhaust)
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


def measure_inflight_nbytes(
    volume: Volume, memory: memoryview, *, item_nbytes: int = 1 << 20, seconds: float = 0.05
) -> int:
    """Bytes in flight from which more bring less than 2 % of a device's read bandwidth.

    Reads random places of `volume` into `memory` (page-aligned, for at least 8 items) with 8, 16
    and 32 threads, `seconds` each, three times in turn: the median counts, because a shared device
    drifts. The places should have been written once: unwritten extents read as zeros without
    touching the device. Raises OSError when the device cannot be read.
    """
    room = min(len(memory), volume.capacity_nbytes) // item_nbytes
    trials: dict[int, list[float]] = {n: [] for n in (8, 16, 32) if n <= room}
    for _ in range(3):
        for num_threads, rates in trials.items():
            rates.append(_read_rate(volume, memory, item_nbytes, num_threads, seconds))
    if not trials:
        return DEFAULT_INFLIGHT_NBYTES
    best = max(median(rates) for rates in trials.values())
    return item_nbytes * min(n for n, rates in trials.items() if median(rates) >= 0.98 * best)


def _read_rate(
    volume: Volume, memory: memoryview, item_nbytes: int, num_threads: int, seconds: float
) -> float:
    done = [0] * num_threads
    errors: list[OSError] = []
    deadline = time.monotonic() + seconds
    span = min(volume.capacity_nbytes // item_nbytes, (64 << 20) // item_nbytes)

    def read(number: int) -> None:
        target = [memory[number * item_nbytes : (number + 1) * item_nbytes]]
        place = random.Random(number)
        try:
            while time.monotonic() < deadline:
                done[number] += volume.read(place.randrange(span) * item_nbytes, target)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(num_threads)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(done) / (time.monotonic() - started)
