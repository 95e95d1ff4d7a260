"""Least recently used, and gone after a time."""

from __future__ import annotations

import time
from collections.abc import Callable

from headstart.errors import ConfigError
from headstart.policies.byrow import ByRow

TTL_S = 3600.0


class TtlPolicy:
    """`lru` in which a block that was not used for `ttl_s` is no hit any more.

    Room is made only when it is needed, so a time alone would change nothing: what has been unused
    the longest goes first anyway. What changes is the look-up: after its time a block is a miss,
    although its bytes are there, until they are overwritten or the prompt is stored again, which is
    a use. So nobody is answered from what is older than the operator allows, and `headstart tune`
    tells what an allowance costs. It is no erasure: `discard_namespace` is. Parents are used with
    their children, so what is left of a prompt is a prefix.

    The time is this process's: after a restart all that is there counts as used at the start, since
    uses are not logged.
    """

    name = "ttl"

    def __init__(
        self, ttl_s: float = TTL_S, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` in seconds, monotonic. Raises ConfigError."""
        if not ttl_s > 0.0:
            raise ConfigError(f"ttl={ttl_s} must be a duration above 0")
        self._ttl_s, self._clock = ttl_s, clock
        self._used_s = ByRow("d", clock())

    def on_insert(self, *, row: int, clock: int) -> int:
        """The present."""
        self._used_s[row] = self._clock()
        return clock

    def on_hit(self, *, row: int, priority: int, clock: int) -> int:
        """The present."""
        self._used_s[row] = self._clock()
        return clock

    def is_gone(self, row: int) -> bool:
        """Whether its last use is too long ago."""
        return self._clock() - self._used_s[row] > self._ttl_s
