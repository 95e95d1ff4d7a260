"""What tiers hold of each prompt when it comes: the seam between hits and times.

`headstart.tuner.latency` wants, for each tier, the blocks at the start of each prompt that it and
the faster ones hold. Who simulates tiers that hold other things than here, such as with other
policies by tier or late writes, gives another `Hold`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from headstart.tuner.curve import depths
from headstart.tuner.recorded import Ints, Recorded
from headstart.tuner.simulate import simulate


class Hold(Protocol):
    """Says what tiers hold."""

    def __call__(self, recorded: Recorded, policy: str, capacities: Sequence[int]) -> list[Ints]:
        """Blocks at the start of each prompt in tiers of so many blocks, one array a tier.

        Arrays are of the length of `recorded`, and are not changed by anyone.
        """


class InclusiveTiers:
    """A block is stored in every tier, as Headstart does, and each evicts by itself.

    So a tier holds what it would hold alone: `lru` at all capacities comes from one pass, another
    policy from one simulation a capacity. Both are kept, as many settings share them. For one trace
    in several block sizes.
    """

    def __init__(self) -> None:
        self._depths: dict[int, Ints] = {}
        self._held: dict[tuple[int, str, int], Ints] = {}

    def __call__(self, recorded: Recorded, policy: str, capacities: Sequence[int]) -> list[Ints]:
        """See `Hold`."""
        return [self._alone(recorded, policy, capacity) for capacity in capacities]

    def _alone(self, recorded: Recorded, policy: str, capacity: int) -> Ints:
        key = recorded.block_size, policy, capacity
        if key not in self._held:
            if policy == "lru":
                self._held[key] = self._lru(recorded, capacity)
            else:
                self._held[key] = simulate(recorded, policy, capacity)
        return self._held[key]

    def _lru(self, recorded: Recorded, capacity: int) -> Ints:
        size = recorded.block_size
        if size not in self._depths:
            self._depths[size] = depths(recorded)
        before = np.append(0, np.cumsum(self._depths[size] <= capacity, dtype=np.int64))
        found: Ints = before[recorded.starts[1:]] - before[recorded.starts[:-1]]
        return found


class RestartedTiers:
    """The same, where engines and node are started anew before some requests: files stay.

    The first capacity is that of what a restart empties: memory, or an engine's own cache.
    """

    def __init__(self, before: Sequence[int]) -> None:
        """`before`: numbers of requests, rising."""
        self._starts = (0, *before)
        self._lives = [InclusiveTiers() for _ in self._starts]
        self._files = InclusiveTiers()

    def __call__(self, recorded: Recorded, policy: str, capacities: Sequence[int]) -> list[Ints]:
        """See `Hold`."""
        if not capacities:
            return []
        life = np.searchsorted(self._starts, np.arange(len(recorded)), side="right") - 1
        emptied = [
            tiers(recorded.chosen(life == number), policy, capacities[:1])[0]
            for number, tiers in enumerate(self._lives)
        ]
        return [np.concatenate(emptied), *self._files(recorded, policy, capacities[1:])]
