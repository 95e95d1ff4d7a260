"""How many bytes a device needs in flight to be busy, measured."""

from __future__ import annotations

import random
import threading
import time
from statistics import median

from headstart.tiers.volume import Volume
from headstart.transfer import DEFAULT_INFLIGHT_NBYTES


def measure_inflight_nbytes(
    volume: Volume, memory: memoryview, *, item_nbytes: int = 1 << 20, seconds: float = 0.05
) -> int:
    """Bytes in flight from which more bring less than 2 % of a device's read bandwidth.

    Reads random places of `volume` into `memory` (page-aligned, for at least 8 items) with 8, 16
    and 32 threads, `seconds` each, three times in turn: the median counts, because a shared device
    drifts. The places should have been written once: unwritten extents read as zeros without
    touching the device. Raises OSError when the device cannot be read.
    """
    room = min(len(memory), volume.capacity_nbytes) // item_nbytes
    trials: dict[int, list[float]] = {n: [] for n in (8, 16, 32) if n <= room}
    for _ in range(3):
        for num_threads, rates in trials.items():
            rates.append(_read_rate(volume, memory, item_nbytes, num_threads, seconds))
    if not trials:
        return DEFAULT_INFLIGHT_NBYTES
    best = max(median(rates) for rates in trials.values())
    return item_nbytes * min(n for n, rates in trials.items() if median(rates) >= 0.98 * best)


def _read_rate(
    volume: Volume, memory: memoryview, item_nbytes: int, num_threads: int, seconds: float
) -> float:
    done = [0] * num_threads
    errors: list[OSError] = []
    deadline = time.monotonic() + seconds
    span = min(volume.capacity_nbytes // item_nbytes, (64 << 20) // item_nbytes)

    def read(number: int) -> None:
        target = [memory[number * item_nbytes : (number + 1) * item_nbytes]]
        place = random.Random(number)
        try:
            while time.monotonic() < deadline:
                done[number] += volume.read(place.randrange(span) * item_nbytes, target)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(num_threads)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(done) / (time.monotonic() - started)
