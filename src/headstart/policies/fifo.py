"""First in, first out."""

from __future__ import annotations


class FifoPolicy:
    """Evicts the leaf that was stored first; hits change nothing."""

    name = "fifo"

    def on_insert(self, *, clock: int, block_nbytes: int) -> int:
        """The present."""
        return clock

    def on_hit(self, *, priority: int, clock: int, block_nbytes: int) -> int:
        """Unchanged."""
        return priority

    def on_evict(self, *, priority: int) -> None:
        """Nothing to learn."""
