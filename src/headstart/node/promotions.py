"""Promotions: prompts whose held prefix is brought into the arena while they wait.

    started   pinned at once where memory holds all of it, else read by a thread of the pool
    queued    more than the budget is pinned by earlier ones: started in order of arrival
    joined    another promotion reads the same blocks: looked at again when that one is over

A waiting prompt pins its blocks, so all of them together may pin only a part of the arena. Beyond
that nothing is promoted: blocks brought in for one waiting prompt would push out another's.

A promotion is loaded once, by whoever takes it first: a thread of the pool, the one that cuts it
short, or, with nothing loaded, the one that ends it. Only the pool waits for a medium.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from queue import PriorityQueue

from headstart.lease import Lease
from headstart.node.board import Phase
from headstart.store import PrefixStore
from headstart.types import BlockKey, KeyChain
from headstart.units import align_up

_log = logging.getLogger(__name__)

Tell = Callable[[Phase, int], None]
"""Called with the phase and the ready blocks, on any thread; must not block."""


class Promotion:
    """One prompt's promotion. Its state is guarded by the lock of `Promotions`."""

    def __init__(self, chain: KeyChain, tell: Tell, timeout_s: float, deadline: float) -> None:
        self.chain = chain
        self.timeout_s, self.deadline = timeout_s, deadline
        self.nbytes = len(chain) * align_up(chain.block_nbytes)
        """Bytes that it counts for in the budget."""
        self.lease: Lease | None = None
        self.is_owned = True
        """Whether somebody will take or end the lease."""
        self._tell = tell
        self._joined: list[tuple[Promotion, int]] = []
        """Those that wait for the same blocks, and how many at the start they share."""
        self._is_taken = False
        self._is_cut = False
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether the lease is as long as it will get."""
        return self._over.is_set()


class Promotions:
    """The pool that reads, and the budget of pinned bytes. Thread-safe."""

    def __init__(
        self,
        store: PrefixStore,
        *,
        max_pinned_nbytes: int,
        num_threads: int = 16,
        timeout_s: float = 30.0,
        on_load: Callable[[Lease], None] | None = None,
        may_read: Callable[[str], bool] = lambda tier: True,
    ) -> None:
        """Reads longer than `timeout_s` are given up; what is ready then counts.

        `on_load` sees every lease when it is ready. A tier that `may_read` denies by its name is
        not read any more.
        """
        self._on_load, self._may_read = on_load, may_read
        self._store = store
        self._max_pinned_nbytes = max_pinned_nbytes
        self._timeout_s = timeout_s
        self.pinned_nbytes = 0
        self._waiting: deque[Promotion] = deque()
        self._readers: dict[BlockKey, Promotion] = {}
        """First block that is not in memory -> the promotion that reads it."""
        self._is_closing = False
        self._lock = threading.Lock()
        self._jobs: PriorityQueue[tuple[float, int, Promotion | None, BlockKey]] = PriorityQueue()
        """By deadline, then in order of arrival."""
        self._num_jobs = count()
        self._num_busy = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"headstart-promote-{n}", daemon=True)
            for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        """Promotions that wait for the budget."""
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Whether every thread reads: the next read waits for one, however urgent it is."""
        return self._num_busy >= len(self._threads)

    def start(
        self, chain: KeyChain, tell: Tell, timeout_s: float = 0.0, deadline: float = math.inf
    ) -> Promotion:
        """Promote the blocks of `chain`, which some tier holds, or as many as may be pinned.

        `timeout_s` is for a read that is known to take longer than reads may. Those with an earlier
        `deadline` are read first.
        """
        promotion = Promotion(
            chain.run(0, min(len(chain), self.max_blocks(chain.block_nbytes))),
            tell,
            max(timeout_s, self._timeout_s),
            deadline,
        )
        with self._lock:
            if self._waiting or not self._fits(promotion):
                self._waiting.append(promotion)
                return promotion
            self.pinned_nbytes += promotion.nbytes
        self._begin(promotion)
        return promotion

    def max_blocks(self, block_nbytes: int) -> int:
        """How many blocks of one prompt may be pinned."""
        return self._max_pinned_nbytes // align_up(block_nbytes)

    def waiting_nbytes(self) -> int:
        """Bytes of promotions that wait for the budget."""
        with self._lock:
            return sum(promotion.nbytes for promotion in self._waiting)

    def cut(self, promotion: Promotion, timeout_s: float) -> Lease | None:
        """Stop reading; the lease with what is ready, None if that takes too long.

        None at once for one that waits for the budget: it may pin nothing.
        """
        with self._lock:
            promotion._is_cut = True
            if promotion in self._waiting:
                return None
        if not promotion._is_taken:  # it stands in line for a thread: memory may hold its start
            self._load_from_memory(promotion)
        promotion._over.wait(timeout_s)
        return promotion.lease

    def end(self, promotion: Promotion) -> None:
        """Give the lease back, now or as soon as its read returns. Idempotent.

        When this returns, nothing more is told.
        """
        with self._lock:
            if promotion.is_owned and not promotion.is_over:
                promotion._tell(Phase.DONE, 0)
            promotion.is_owned, promotion._is_cut = False, True
            if promotion in self._waiting:
                self._waiting.remove(promotion)
                promotion.nbytes = 0
            elif promotion._is_taken and not promotion.is_over:
                return  # the thread that reads for it frees it
            promotion._is_taken = True
            promotion._over.set()
        self._free(promotion)

    def close(self) -> None:
        """Cut what is read short and end the threads, as far as their devices return in time."""
        with self._lock:
            self._is_closing = True
        for _ in self._threads:
            self._put(None, math.inf, BlockKey(b""))
        deadline = time.monotonic() + self._timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _fits(self, promotion: Promotion) -> bool:
        return self.pinned_nbytes + promotion.nbytes <= self._max_pinned_nbytes

    def _begin(self, promotion: Promotion) -> None:
        """Load at once what memory holds; else read, or join the one that reads the same."""
        chain = promotion.chain
        in_memory = self._num_in_memory(chain)
        if in_memory == len(chain):
            self._load_from_memory(promotion)
            return
        key = chain.keys[in_memory]
        with self._lock:
            reader = self._readers.get(key)
            if reader is not None:
                reader.deadline = min(reader.deadline, promotion.deadline)
                reader._joined.append((promotion, _num_shared(reader.chain, chain)))
                return
            self._readers[key] = promotion
        self._put(promotion, promotion.deadline, key)

    def _put(self, promotion: Promotion | None, deadline: float, key: BlockKey) -> None:
        self._jobs.put((deadline, next(self._num_jobs), promotion, key))

    def _work(self) -> None:
        while True:
            _, _, promotion, key = self._jobs.get()
            if promotion is None:
                return
            with self._lock:
                self._num_busy += 1
            self._load(promotion, promotion.chain, promotion.timeout_s)
            with self._lock:
                self._num_busy -= 1
                del self._readers[key]
                joined, promotion._joined = promotion._joined, []
            for other, _ in joined:
                self._begin(other)

    def _num_in_memory(self, chain: KeyChain) -> int:
        """Blocks that memory holds; a closing node asks no more and lets everything end."""
        if self._is_closing:
            return len(chain)
        return self._store.lookup(chain).by_tier["memory"]

    def _load_from_memory(self, promotion: Promotion) -> None:
        """Load what memory holds, on a thread that must not wait for a medium."""
        chain = promotion.chain
        self._load(promotion, chain.run(0, self._num_in_memory(chain)), 0.0)

    def _load(self, promotion: Promotion, chain: KeyChain, timeout_s: float) -> None:
        with self._lock:
            if promotion._is_taken:
                return
            promotion._is_taken = True
        lease = None
        if promotion.is_owned and not self._is_closing:
            try:
                lease = self._store.load(
                    chain,
                    timeout_s=timeout_s,
                    go_on=lambda ready, tier: self._go_on(promotion, ready, tier),
                    may_read=self._may_read,
                    deadline=lambda: promotion.deadline,
                )
                if self._on_load is not None:
                    self._on_load(lease)
            except Exception:  # noqa: BLE001 - a thread's top: a bug costs a miss, not the thread
                _log.exception("a promotion failed")
        with self._lock:
            promotion.lease = lease
            promotion._over.set()
            self._tell(promotion, Phase.DONE, 0 if lease is None else lease.ready_blocks)
            is_owned = promotion.is_owned
        if not is_owned:
            self._free(promotion)

    def _go_on(self, promotion: Promotion, ready_blocks: int, tier: str) -> bool:
        with self._lock:
            self._tell(promotion, Phase.READING, ready_blocks)
        return not promotion._is_cut and not self._is_closing and self._may_read(tier)

    def _tell(self, promotion: Promotion, phase: Phase, ready_blocks: int) -> None:
        """Tell how far one is, also to those that wait for the same blocks. Under the lock."""
        if promotion.is_owned:
            promotion._tell(phase, ready_blocks)
        for other, num_shared in promotion._joined:
            if other.is_owned and not other._is_taken:
                other._tell(Phase.READING, min(ready_blocks, num_shared))

    def _free(self, promotion: Promotion) -> None:
        with self._lock:
            lease, promotion.lease = promotion.lease, None
            nbytes, promotion.nbytes = promotion.nbytes, 0
        if lease is not None:
            lease.close()
        begin: list[Promotion] = []
        with self._lock:
            self.pinned_nbytes -= nbytes
            while self._waiting and self._fits(self._waiting[0]):
                waiting = self._waiting.popleft()
                self.pinned_nbytes += waiting.nbytes
                begin.append(waiting)
        for waiting in begin:
            self._begin(waiting)


def _num_shared(one: KeyChain, other: KeyChain) -> int:
    """Blocks at the start that two chains share."""
    num = min(len(one), len(other))
    return next((n for n in range(num) if one.keys[n] != other.keys[n]), num)
