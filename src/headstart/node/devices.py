"""The tiers' devices as the node sees them: what their reads cost now, and whether to trust them.

Every read that ends is learnt from. A device that breaks its model, or gives nothing for long, is
left alone by requests (`Breaker`) until background reads of held blocks, *probes*, say how fast it
is. They are made as well where a model is still a guess, and where requests were told to compute
rather than wait for a device: else nobody would notice that it has become fast.
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headstart.breaker import Breaker, Cause
from headstart.costs import ReadCosts, ReadModel
from headstart.tiers.base import Batch, Sampled, Tier
from headstart.transfer import ReadSample, Transfer
from headstart.types import KeyChain, Outcome
from headstart.units import align_up

_log = logging.getLogger(__name__)
TICK_S = 0.1
_STALL_S = 0.5
_STALL_RATIO = 10.0
_NUM_FIRST = 3
"""Probes of a device of which nothing is known."""
_WANTED_S = 60.0
_REST_S = 2.0
_MAX_REST_S = 10.0
_REST_RATIO = 10.0
_INFLIGHT_S = 0.25
"""Of a device's work that is in flight: less than what it takes to answer would leave it idle; more
makes the first block of a prefix come as late as its last, and an urgent read wait behind it."""
_NOISE_S = 0.05
"""A read that is late by less says nothing about a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """What `headstart node status` shows of a tier's device."""

    bytes_per_s: float
    fixed_s: float
    num_observed: int
    breaker: str
    """Why it is open; "closed"."""
    num_opened: int
    num_probes: int


class Device:
    """One tier's. Thread-safe."""

    def __init__(self, tier: Tier, transfer: Transfer, *, clock: Callable[[], float]) -> None:
        self.name = tier.name
        self._tier, self._transfer, self._clock = tier, transfer, clock
        self._model, self._breaker = ReadModel(), Breaker()
        self._lock = threading.Lock()
        self._is_probing = False
        self._probing_nbytes = 0
        self._num_probes = 0
        self._closed_at = float("-inf")
        self._wanted_until = self._next_probe_at = float("-inf")
        transfer.on_read = self._observe

    @property
    def is_open(self) -> bool:
        """Whether its breaker is open: no request may read."""
        return self._breaker.is_open

    def costs(
        self, block_nbytes: int, waiting_nbytes: int = 0, deadline: float = math.inf
    ) -> ReadCosts | None:
        """What a read of such blocks costs that is asked for now; None: none may be.

        It is behind so many bytes, and behind the reads whose deadlines are not later than its own.
        """
        with self._lock:
            if self._breaker.is_open:
                return None
            ahead_nbytes = self._transfer.ahead_nbytes(deadline) + waiting_nbytes
            lag_nbytes = self._transfer.num_at_once(block_nbytes) * block_nbytes
            return self._model.costs(ahead_nbytes + self._probing_nbytes, lag_nbytes)

    def want(self) -> None:
        """A request would have liked to read from it, had it been faster."""
        self._wanted_until = self._clock() + _WANTED_S

    def state(self) -> DeviceState:
        """Its present state."""
        with self._lock:
            costs = self._model.costs()
            return DeviceState(
                bytes_per_s=costs.bytes_per_s,
                fixed_s=costs.fixed_s,
                num_observed=self._model.num_observed,
                breaker=self._breaker.cause or "closed",
                num_opened=self._breaker.num_opened,
                num_probes=self._num_probes,
            )

    def tick(self) -> None:
        """Look for a stall, and probe if it is time to."""
        unmoved_s, now = self._transfer.unmoved_s(), self._clock()
        with self._lock:
            item_s = self._model.costs().read_s(self._transfer.inflight_nbytes)
            if unmoved_s > max(_STALL_S, _STALL_RATIO * item_s):
                self._open(Cause.STALL, now)
            if self._is_probing or not self._is_due(now):
                return
            self._is_probing = True
        is_begun = False
        try:
            is_begun = self._probe()
        finally:
            if not is_begun:
                self._is_probing, self._next_probe_at = False, now + _REST_S

    def _is_due(self, now: float) -> bool:
        if self._breaker.is_open:
            return self._breaker.is_probe_due(now)
        if now < self._next_probe_at or self._transfer.reading_nbytes:
            return False
        return self._model.num_observed < _NUM_FIRST or now < self._wanted_until

    def _probe(self) -> bool:
        """Begin to read held blocks; False when there are none.

        As many as requests have in flight: what bursts give to a single one is not what they get.
        The first one of all, and those that ask an ill device, are of one block.
        """
        if not isinstance(self._tier, Sampled) or (first := self._tier.sample()) is None:
            return False
        chains, more = [first], self._transfer.num_at_once(first.block_nbytes) - 1
        if self._model.num_observed and not self._breaker.is_open:
            chains += [chain for _ in range(more) if (chain := self._tier.sample()) is not None]
        nbytes = sum(chain.block_nbytes for chain in chains)
        over: list[list[Outcome]] = []

        def is_alone() -> bool:
            return not (self._transfer.queued_nbytes or self._transfer.reading_nbytes)

        def done(outcomes: list[Outcome]) -> None:
            now = self._clock()
            with self._lock:
                over.append(outcomes)
                is_last = len(over) == len(chains)
            if is_last:
                is_good = all(each == [Outcome.DONE] for each in over)
                seconds, was_too = max(1e-6, now - started), was_alone and is_alone()
                self._probed(nbytes, seconds, is_good=is_good, is_alone=was_too)

        was_alone = is_alone()
        batches = self._begin_probes(chains)
        self._num_probes += 1
        self._probing_nbytes = nbytes
        started = self._clock()
        for batch in batches:
            self._transfer.read(batch, done, deadline=-math.inf)
        return True

    def _begin_probes(self, chains: list[KeyChain]) -> list[Batch]:
        assert isinstance(self._tier, Sampled)
        batches: list[Batch] = []
        try:
            for chain in chains:
                target = memoryview(mmap.mmap(-1, align_up(chain.block_nbytes)))
                batches.append(self._tier.begin_probe(chain, [target]))
        except BaseException:
            for batch in batches:
                batch.finish()
            raise
        return batches

    def _probed(self, nbytes: int, seconds: float, *, is_good: bool, is_alone: bool) -> None:
        """A probe is over. Beside other work its time says little of the device."""
        now = self._clock()
        with self._lock:
            self._is_probing, self._probing_nbytes = False, 0
            is_first = is_good and self._model.num_observed < _NUM_FIRST
            rest_s = 0.0 if is_first else max(_REST_S, _REST_RATIO * seconds)
            self._next_probe_at = now + min(_MAX_REST_S, rest_s)
            ratio = self._lateness(nbytes, seconds) if is_good and is_alone else 1.0
            if is_good:
                self._learn(nbytes, seconds)
            if self._breaker.read(ratio=ratio, is_good=is_good, now=now):
                self._opened()
                return
            rate = nbytes / seconds if is_good else None
            if self._breaker.probed(bytes_per_s=rate, now=now):
                self._closed_at = now
                _log.warning("tier %s is used again: %.0f MB/s", self.name, nbytes / seconds / 1e6)

    def _observe(self, sample: ReadSample) -> None:
        """A request's read is over."""
        now = self._clock()
        with self._lock:
            if self._breaker.is_open or now - sample.seconds < self._closed_at:
                return  # what it took while the device was ill says nothing about later
            ratio = 1.0
            if sample.nbytes > 0 and sample.is_good and sample.seconds > 0.0:
                ratio = self._lateness(sample.nbytes, sample.seconds)
                self._learn(sample.nbytes, sample.seconds)
            opened = self._breaker.read(ratio=ratio, is_good=sample.is_good, now=now)
            if opened:
                self._opened()

    def _learn(self, nbytes: int, seconds: float) -> None:
        """A read of so many bytes took so long."""
        self._model.observe(nbytes, seconds)
        costs = self._model.costs()
        useful_nbytes = int(costs.bytes_per_s * (_INFLIGHT_S + costs.fixed_s))
        self._transfer.wanted_nbytes = min(self._transfer.inflight_nbytes, useful_nbytes)

    def _lateness(self, nbytes: int, seconds: float) -> float:
        """How many times longer than expected a read took; 1 where that says nothing."""
        found = self._model.ratio(nbytes, seconds)
        late_s = seconds * (1.0 - 1.0 / found)
        is_known = self._model.num_observed >= _NUM_FIRST
        return found if is_known and late_s > _NOISE_S else 1.0

    def _open(self, cause: Cause, now: float) -> None:
        if self._breaker.open(cause, now):
            self._opened()

    def _opened(self) -> None:
        self._model.reset()
        self._transfer.wanted_nbytes = self._transfer.inflight_nbytes
        _log.warning(
            "tier %s breaks its model (%s): requests are computed until it is measured again",
            self.name,
            self._breaker.cause,
        )


class Devices:
    """All lower tiers' devices, and the thread that looks after them."""

    def __init__(
        self,
        lower: Sequence[tuple[Tier, Transfer]],
        *,
        tick_s: float | None = TICK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tick_s` None: nobody looks after them but the caller, by `Device.tick`."""
        self.by_tier = {tier.name: Device(tier, transfer, clock=clock) for tier, transfer in lower}
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []
        if tick_s is not None and self.by_tier:
            thread = threading.Thread(
                target=self._work, args=(tick_s,), name="headstart-probe", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def may_read(self, tier: str) -> bool:
        """Whether requests may read a tier."""
        return not self.by_tier[tier].is_open

    def states(self) -> dict[str, DeviceState]:
        """The state of each, by tier."""
        return {name: device.state() for name, device in self.by_tier.items()}

    def close(self) -> None:
        """End the thread."""
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _work(self, tick_s: float) -> None:
        while not self._ends.wait(tick_s):
            for device in self.by_tier.values():
                try:
                    device.tick()
                except Exception:  # noqa: BLE001 - a thread's top: a bug costs probes, not the node
                    _log.exception("tier %s could not be looked after", device.name)
