"""The breaker of a tier: opens when reads break the model, closes by probes. Pure.

    closed --a stall, errors, or a read of 10 times the expected time--> open
    open   --probes, of which the last three agree and failed none-----> closed

While it is open no request reads the tier; only probes do. They may agree at full speed, and all is
as it was, or at another one, which the model then has learnt: the planner decides by it.
"""

from __future__ import annotations

import enum
from collections import deque

MAX_RATIO = 10.0
"""A read that takes so many times the expected time opens the breaker."""
_AGREE = 3.0
_NUM_PROBES = 3
_NUM_ERRORS = 2
_PROBE_S = 0.5
_MAX_PROBE_S = 5.0


class Cause(enum.StrEnum):
    """What opened a breaker."""

    STALL = "stall"
    SLOW = "slow"
    ERRORS = "errors"


class Breaker:
    """See the module. Times by one monotonic clock, in seconds. For one thread."""

    def __init__(self) -> None:
        self.cause: Cause | None = None
        """What opened it; None: closed."""
        self.opened_at = 0.0
        self.num_opened = 0
        self._num_errors = 0
        self._probes: deque[float] = deque(maxlen=_NUM_PROBES)
        self._probe_s = _PROBE_S
        self._next_probe_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether no request may read."""
        return self.cause is not None

    def open(self, cause: Cause, now: float) -> bool:
        """Open it; whether it was closed."""
        if self.is_open:
            return False
        self.cause, self.opened_at = cause, now
        self.num_opened += 1
        self._num_errors = 0
        self._probes.clear()
        self._probe_s, self._next_probe_at = _PROBE_S, now + _PROBE_S
        return True

    def read(self, *, ratio: float, is_good: bool, now: float) -> bool:
        """A request's read took `ratio` times the expected time; whether that opened it."""
        if self.is_open:
            return False
        self._num_errors = 0 if is_good else self._num_errors + 1
        if self._num_errors >= _NUM_ERRORS:
            return self.open(Cause.ERRORS, now)
        return is_good and ratio > MAX_RATIO and self.open(Cause.SLOW, now)

    def is_probe_due(self, now: float) -> bool:
        """Whether it is time for the next probe."""
        return self.is_open and now >= self._next_probe_at

    def probed(self, *, bytes_per_s: float | None, now: float) -> bool:
        """A probe read at this rate, or failed (None); whether that closed it."""
        if not self.is_open:
            return False
        if bytes_per_s is None:
            self._probes.clear()
            self._probe_s = min(2 * self._probe_s, _MAX_PROBE_S)
        else:
            self._probes.append(bytes_per_s)
        self._next_probe_at = now + self._probe_s
        if len(self._probes) < _NUM_PROBES or max(self._probes) > _AGREE * min(self._probes):
            return False
        self.cause = None
        return True
