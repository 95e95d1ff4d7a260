"""What the index costs: reopening a directory, looking up a prompt, memory a block.

The directory holds blocks of one page, published without payload: neither reopening nor look-up
ever reads any. Chains are as long as the prompt that is looked up.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headstart.bench.statistics import quantile
from headstart.bench.storage import Progress, scratch_root
from headstart.blockfile import slot_nbytes
from headstart.keys import BlockLayout, Namespace, block_keys
from headstart.tiers import FileTier, FileTierOptions, write
from headstart.types import BlockKey, KeyChain
from headstart.units import PAGE_NBYTES

_LAYOUT = BlockLayout(block_size=1, axes="byte", shape=(PAGE_NBYTES,), dtype="uint8")
_NAMESPACE = Namespace(model="bench", weights="none", layout=_LAYOUT)
_SLOT_NBYTES = slot_nbytes(PAGE_NBYTES)
_NUM_WRITERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReopenResult:
    """Opening a directory of `num_blocks` blocks whose log is not in the page cache."""

    num_blocks: int
    seconds: float
    index_bytes_per_block: float
    """Memory of all tables of the index."""
    resident_bytes_per_block: float
    """Growth of the process's resident memory while it was opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    """Looking up prompts of `num_keys` blocks of which a random share is held."""

    num_keys: int
    num_indexed: int
    num_samples: int
    p50_s: float
    p99_s: float
    p99_busy_s: float
    """While four threads write blocks into the full tier, each write evicting one."""
    max_busy_s: float


def bench_bookkeeping(
    root: Path,
    *,
    num_blocks: int = 1_000_000,
    num_keys: int = 8192,
    num_samples: int = 2000,
    progress: Progress = lambda what, done, total: None,
) -> tuple[ReopenResult, LookupResult]:
    """Fill, reopen and look up in a fresh directory under `root`. Raises ConfigError."""
    with scratch_root(root, (num_blocks + 64) * _SLOT_NBYTES) as folder:
        slab_nbytes = -(-num_blocks // 64) * _SLOT_NBYTES
        options = FileTierOptions(
            root=folder / "tier", capacity_nbytes=64 * slab_nbytes, slab_nbytes=slab_nbytes
        )
        _fill(options, num_blocks, num_keys, progress)
        _forget_cached(folder / "tier" / "index.log")
        resident = _resident_nbytes()
        started = time.monotonic()
        tier = FileTier(options)
        seconds = time.monotonic() - started
        grown = _resident_nbytes() - resident
        try:
            tier.open_namespace(_NAMESPACE)
            reopened = ReopenResult(
                num_blocks=len(tier.index),
                seconds=seconds,
                index_bytes_per_block=tier.index.nbytes / max(1, len(tier.index)),
                resident_bytes_per_block=grown / max(1, len(tier.index)),
            )
            quiet = _lookup_seconds(tier, num_blocks, num_keys, num_samples, pause_s=0.0)
            progress("look-up", 1, 2)
            with _writers(tier):
                busy = _lookup_seconds(tier, num_blocks, num_keys, num_samples, pause_s=0.001)
            progress("look-up", 2, 2)
        finally:
            tier.close()
    looked_up = LookupResult(
        num_keys=num_keys,
        num_indexed=reopened.num_blocks,
        num_samples=num_samples,
        p50_s=quantile(quiet, 0.5),
        p99_s=quantile(quiet, 0.99),
        p99_busy_s=quantile(busy, 0.99),
        max_busy_s=max(busy),
    )
    return reopened, looked_up


def _chain(number: int, num_keys: int) -> KeyChain:
    """Prompt `number`: its first token is its own, so that no two prompts share a block."""
    return block_keys(_NAMESPACE, [number, *range(1, num_keys)])


def _fill(options: FileTierOptions, num_blocks: int, num_keys: int, progress: Progress) -> None:
    tier = FileTier(options)
    try:
        tier.open_namespace(_NAMESPACE)
        for number in range(-(-num_blocks // num_keys)):
            chain = _chain(number, min(num_keys, num_blocks - number * num_keys))
            slots = tier.index.reserve(PAGE_NBYTES, len(chain))
            tier.index.publish(
                chain.keys, slots, parent=None, namespace=1, block_nbytes=PAGE_NBYTES
            )
            tier.commit()
            progress("index", len(tier.index), num_blocks)
    finally:
        tier.close()


def _lookup_seconds(
    tier: FileTier, num_blocks: int, num_keys: int, num_samples: int, *, pause_s: float
) -> list[float]:
    """Durations of single look-ups. Half of the prompts diverge somewhere from what is held."""
    chance = random.Random(1)
    num_prompts = max(1, num_blocks // num_keys)
    prompts: list[tuple[BlockKey, ...]] = []
    for number in range(min(16, num_prompts)):
        held = _chain(number, num_keys).keys
        prompts.append(held)
        split = chance.randrange(num_keys)
        prompts.append(held[:split] + _chain(num_prompts + number, num_keys).keys[split:])
    seconds = []
    for number in range(num_samples):
        keys = prompts[number % len(prompts)]
        if pause_s:
            time.sleep(pause_s)
        started = time.perf_counter()
        tier.lookup(keys)
        seconds.append(time.perf_counter() - started)
    return seconds


@contextmanager
def _writers(tier: FileTier) -> Iterator[None]:
    """Threads that write chains of 16 blocks into the tier as fast as they can."""
    stop = threading.Event()

    def work(number: int) -> None:
        page = memoryview(mmap.mmap(-1, PAGE_NBYTES))
        prompt = (number + 1) << 24
        while not stop.is_set():
            prompt += 1
            write(tier, block_keys(_NAMESPACE, [prompt, *range(1, 16)]), [page] * 16)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(_NUM_WRITERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _forget_cached(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _resident_nbytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * PAGE_NBYTES
