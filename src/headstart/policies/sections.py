"""Two queues of leaves, for a policy that has the last word on each block before it goes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from headstart.policies.base import EvictionPolicy, Sectioned
from headstart.policies.queue import LeafQueue


class SectionedQueue:
    """A `LeafQueue` for a `Sectioned` policy: the same methods. Not thread-safe."""

    def __init__(
        self,
        policy: Sectioned,
        current: Callable[[int], int | None],
        raise_to: Callable[[int, int], None],
    ) -> None:
        """`current` as of `LeafQueue`; `raise_to(row, priority)` sets the priority of a row."""
        self._policy, self._current, self._raise_to = policy, current, raise_to
        self._queues = [LeafQueue(partial(self._candidate, section)) for section in (0, 1)]

    def __len__(self) -> int:
        """Entries held, stale ones included."""
        return sum(map(len, self._queues))

    def __contains__(self, row: int) -> bool:
        """Whether `row` has an entry in its section."""
        return row in self._queues[self._policy.section(row)]

    def offer(self, row: int, priority: int) -> None:
        """`row` has become a candidate."""
        self._queues[self._policy.section(row)].offer(row, priority)

    def forget(self, row: int) -> None:
        """See `LeafQueue.forget`."""
        for queue in self._queues:
            queue.forget(row)

    def load(self, priorities: np.ndarray, rows: np.ndarray) -> None:
        """Fill an empty queue with rows that the policy was never told of."""
        self._queues[0].load(priorities, rows)

    def coldest(self) -> tuple[int, int] | None:
        """(priority, row) of what goes next, which stays queued; None when there is none.

        Candidates that the policy spares move on first; asked again, it says the same.
        """
        while True:
            first = self._policy.first_section()
            found = self._queues[first].coldest() or self._queues[1 - first].coldest()
            if found is None:
                return None
            priority, row = found
            spared = self._policy.spare(row=row, priority=priority)
            if spared is None:
                return found
            self._raise_to(row, spared)
            self.offer(row, spared)  # its old entry is corrected when it surfaces

    def _candidate(self, section: int, row: int) -> int | None:
        return self._current(row) if self._policy.section(row) == section else None


Leaves = LeafQueue | SectionedQueue


def leaf_queue(
    policy: EvictionPolicy,
    current: Callable[[int], int | None],
    raise_to: Callable[[int, int], None],
) -> Leaves:
    """The queue of leaves that a policy needs; arguments as of `SectionedQueue`."""
    if isinstance(policy, Sectioned):
        return SectionedQueue(policy, current, raise_to)
    return LeafQueue(current)
