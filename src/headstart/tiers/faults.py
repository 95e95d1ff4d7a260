"""Wrappers that make any tier slow, faulty or observed: `FaultyTier`, `CountingTier`.

Both are tiers themselves. They delegate every call and wrap the batches that come back.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headstart.keys import Namespace
from headstart.tiers.base import Batch, Progress, Sampled, Tier
from headstart.types import BlockKey, KeyChain, NamespaceId, Outcome, TierStats, VerifyReport

STALL_MAX_S = 30.0
"""A stalled I/O goes on by itself after this time, so that no test hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one I/O: first it takes longer, then it may fail."""

    latency_s: float = 0.0
    fails: bool = False
    bytes_per_s: float = math.inf
    """Of all I/O together: each waits for those before it."""


Schedule = Callable[[int], Fault]
"""The fault of the n-th I/O of a tier, counted from 0, reads and writes together."""

NO_FAULT = Fault()


def healthy(number: int) -> Fault:
    """The schedule without faults."""
    del number
    return NO_FAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What I/O suffers from `start_s` to `stop_s`, in seconds after the schedule was made."""

    start_s: float = 0.0
    stop_s: float = math.inf
    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    error_rate: float = 0.0
    stalls: bool = False
    """Every I/O lasts to the end of the phase, or `STALL_MAX_S`."""


def by_time(
    phases: Sequence[Phase],
    *,
    clock: Callable[[], float] = time.monotonic,
    seed: int = 0,
) -> Schedule:
    """A schedule of phases; the last one that has begun and is not over counts."""
    started, chance = clock(), random.Random(seed)

    def schedule(number: int) -> Fault:
        del number
        now = clock() - started
        phase = next((p for p in reversed(phases) if p.start_s <= now < p.stop_s), None)
        if phase is None:
            return NO_FAULT
        stalled_s = min(STALL_MAX_S, phase.stop_s - now) if phase.stalls else 0.0
        return Fault(
            latency_s=phase.latency_s + stalled_s,
            fails=chance.random() < phase.error_rate,
            bytes_per_s=phase.bytes_per_s,
        )

    return schedule


class _Wrapped:
    """A tier that delegates to `inner` and passes every batch, and its bytes, through `_wrap`."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    def _wrap(self, batch: Batch, nbytes: int) -> Batch:
        raise NotImplementedError

    def begin_read(self, chain: KeyChain, targets: Sequence[memoryview]) -> Batch:
        return self._wrap(self.inner.begin_read(chain, targets), _nbytes(chain))

    def begin_write(self, chain: KeyChain, sources: Sequence[memoryview]) -> Batch:
        return self._wrap(self.inner.begin_write(chain, sources), _nbytes(chain))

    def open_namespace(self, namespace: Namespace) -> None:
        self.inner.open_namespace(namespace)

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        return self.inner.lookup(keys)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self.inner.touch(keys)

    def discard(self, keys: Sequence[BlockKey]) -> int:
        return self.inner.discard(keys)

    def discard_namespace(self, namespace: NamespaceId) -> int:
        return self.inner.discard_namespace(namespace)

    def usage(self) -> dict[NamespaceId, int]:
        return self.inner.usage()

    def stats(self) -> TierStats:
        return self.inner.stats()

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        return self.inner.verify(progress)

    def flush(self) -> bool:
        return self.inner.flush()

    def close(self) -> None:
        self.inner.close()


def _nbytes(chain: KeyChain) -> int:
    return len(chain) * chain.block_nbytes


class FaultyTier(_Wrapped):
    """`inner`, slow, stalling or failing as told. Thread-safe.

    A failed I/O never reaches `inner`; its blocks come out FAILED and are counted in
    `stats().num_failed`. `schedule` may be replaced at any time. Close it only when no I/O stalls.
    """

    def __init__(
        self,
        inner: Tier,
        schedule: Schedule = healthy,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self.schedule, self._clock = schedule, clock
        self.num_stalled = 0
        self._sleep = sleep
        self._lock = threading.Lock()
        self._flowing = threading.Event()
        self._flowing.set()
        self._num_ios = 0
        self._num_failed = 0
        self._free_at = float("-inf")

    def sample(self) -> KeyChain | None:
        """As the inner tier."""
        return self.inner.sample() if isinstance(self.inner, Sampled) else None

    def begin_probe(self, chain: KeyChain, targets: Sequence[memoryview]) -> Batch:
        """As the inner tier."""
        assert isinstance(self.inner, Sampled)
        return self._wrap(self.inner.begin_probe(chain, targets), _nbytes(chain))

    def stall(self) -> None:
        """Let every I/O that starts from now on wait for `resume()`, at most `STALL_MAX_S`."""
        self._flowing.clear()

    def resume(self) -> None:
        """Let stalled I/O go on."""
        self._flowing.set()

    def stats(self) -> TierStats:
        """As the inner tier."""
        stats = self.inner.stats()
        return replace(stats, num_failed=stats.num_failed + self._num_failed)

    def suffer(self, nbytes: int) -> bool:
        """Wait as long as the next I/O of the schedule must; True when it then fails."""
        with self._lock:
            fault = self.schedule(self._num_ios)
            now = self._clock()
            self._free_at = max(now, self._free_at) + nbytes / fault.bytes_per_s
            wait_s = fault.latency_s + self._free_at - now
            self._num_ios += 1
            self.num_stalled += not self._flowing.is_set()
        if not self._flowing.is_set():
            self._flowing.wait(STALL_MAX_S)
            with self._lock:
                self.num_stalled -= 1
        if wait_s > 0:
            self._sleep(wait_s)
        return fault.fails

    def count_failed(self, num_blocks: int) -> None:
        """Add to `stats().num_failed`."""
        with self._lock:
            self._num_failed += num_blocks

    def _wrap(self, batch: Batch, nbytes: int) -> Batch:
        return _FaultyBatch(self, batch, nbytes)


class _FaultyBatch:
    """A batch whose I/O goes through `FaultyTier.suffer` first."""

    def __init__(self, tier: FaultyTier, inner: Batch, nbytes: int) -> None:
        self.tier, self.inner = tier, inner
        self.io_nbytes = nbytes // max(1, len(inner))
        """On average: how an inner batch divides them is its own affair."""
        self.failed: set[int] = set()

    @property
    def item_nbytes(self) -> int:
        return self.inner.item_nbytes

    def __len__(self) -> int:
        return len(self.inner)

    def run(self, index: int) -> None:
        if self.tier.suffer(self.io_nbytes):
            self.failed.add(index)
        else:
            self.inner.run(index)

    def ready_blocks(self) -> int:
        return self.inner.ready_blocks()

    def finish(self) -> list[Outcome]:
        # Which blocks an index moves is the inner tier's affair: every block from the first
        # that is a miss counts as failed, as if the medium had answered none of them.
        outcomes = self.inner.finish()
        if self.failed:
            failed = [outcome is Outcome.MISS for outcome in outcomes]
            outcomes = [Outcome.FAILED if f else o for f, o in zip(failed, outcomes, strict=True)]
            self.tier.count_failed(sum(failed))
        return outcomes


class CountingTier(_Wrapped):
    """`inner`, with counts of what was asked of it. Thread-safe."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self.num_lookups = 0
        self.num_begun = 0
        self.num_runs = 0
        self.num_finished = 0
        self.num_running_max = 0
        """The most I/Os that ever ran at once."""
        self._num_running = 0

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """As the inner tier."""
        with self._lock:
            self.num_lookups += 1
        return self.inner.lookup(keys)

    def sample(self) -> KeyChain | None:
        """As the inner tier."""
        return self.inner.sample() if isinstance(self.inner, Sampled) else None

    def begin_probe(self, chain: KeyChain, targets: Sequence[memoryview]) -> Batch:
        """As the inner tier."""
        assert isinstance(self.inner, Sampled)
        return self._wrap(self.inner.begin_probe(chain, targets), _nbytes(chain))

    def enter(self) -> None:
        """An I/O starts."""
        with self._lock:
            self.num_runs += 1
            self._num_running += 1
            self.num_running_max = max(self.num_running_max, self._num_running)

    def leave(self) -> None:
        """An I/O has ended."""
        with self._lock:
            self._num_running -= 1

    def count_finished(self) -> None:
        """A batch has finished."""
        with self._lock:
            self.num_finished += 1

    def _wrap(self, batch: Batch, nbytes: int) -> Batch:
        with self._lock:
            self.num_begun += 1
        return _CountedBatch(self, batch)


class _CountedBatch:
    """A batch that tells its `CountingTier` what is done with it."""

    def __init__(self, tier: CountingTier, inner: Batch) -> None:
        self.tier, self.inner = tier, inner

    @property
    def item_nbytes(self) -> int:
        return self.inner.item_nbytes

    def __len__(self) -> int:
        return len(self.inner)

    def run(self, index: int) -> None:
        self.tier.enter()
        try:
            self.inner.run(index)
        finally:
            self.tier.leave()

    def ready_blocks(self) -> int:
        return self.inner.ready_blocks()

    def finish(self) -> list[Outcome]:
        outcomes = self.inner.finish()
        self.tier.count_finished()
        return outcomes
