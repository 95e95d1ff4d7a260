"""Least recently used."""

from __future__ import annotations


class LruPolicy:
    """Evicts the leaf whose last use is oldest. A hit on a prefix counts as a use of all of it."""

    name = "lru"

    def on_insert(self, *, row: int, clock: int) -> int:
        """The present."""
        return clock

    def on_hit(self, *, row: int, priority: int, clock: int) -> int:
        """The present."""
        return clock
