"""Counters of a tier, from which its `TierStats` are made."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from headstart.blockfile import Damage
from headstart.index import Index
from headstart.types import TierStats


class Counters:
    """Named sums, added to from any thread. The index counts what happens to its rows itself."""

    def __init__(self) -> None:
        self.damage: Counter[Damage] = Counter()
        """Dropped blocks by cause."""
        self._sums: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, **numbers: int) -> None:
        """Add to fields of `TierStats` by name."""
        with self._lock:
            self._sums.update(numbers)

    def add_damage(self, found: Sequence[Damage]) -> None:
        """Count dropped blocks by cause."""
        with self._lock:
            self.damage.update(found)

    def stats(self, name: str, index: Index) -> TierStats:
        """The tier's statistics now."""
        with self._lock:
            sums = dict(self._sums)
            damage = {cause.name.lower(): count for cause, count in self.damage.items()}
        return TierStats(
            name=name,
            capacity_nbytes=index.slots.capacity_nbytes,
            used_nbytes=index.slots.used_nbytes,
            num_blocks=len(index),
            num_stored=index.counters.num_stored,
            num_evicted=index.counters.num_evicted,
            num_discarded=index.counters.num_discarded,
            num_dropped=index.counters.num_dropped,
            damage=damage,
            **sums,
        )
