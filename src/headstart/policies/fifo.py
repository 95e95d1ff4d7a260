"""First in, first out."""

from __future__ import annotations


class FifoPolicy:
    """Evicts the leaf that was stored first; hits change nothing."""

    name = "fifo"

    def on_insert(self, *, row: int, clock: int) -> int:
        """The present."""
        return clock

    def on_hit(self, *, row: int, priority: int, clock: int) -> int:
        """Unchanged."""
        return priority
