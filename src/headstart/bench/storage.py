"""How close a file tier comes to its device, and what its index costs.

The yardstick is plain `preadv` with O_DIRECT on the very same blocks of the very same files, with
the number of threads that is best for the block size, chosen beforehand. Each round reads the same
blocks in the same order three times, raw, Headstart and raw again, in shuffled order.
Headstart's time is a whole `PrefixStore.load`: look-up, eviction, reads, checksums, publishing. The
share is the ratio within a round, because the device's speed drifts between rounds; raw against raw
shows how much of a share is noise.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from headstart.bench.statistics import median_with_interval
from headstart.blockfile import HEADER_NBYTES, slot_nbytes
from headstart.config import inflight_nbytes
from headstart.errors import ConfigError
from headstart.keys import BlockLayout, Namespace, block_keys
from headstart.store import PrefixStore
from headstart.tiers import FileTier, FileTierOptions, MemoryTier
from headstart.transfer import Transfer
from headstart.types import KeyChain
from headstart.units import align_up, format_nbytes

BLOCK_SIZES = (128 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
_THREADS = (1, 2, 4, 8, 16)
Progress = Callable[[str, int, int], None]
"""Called with (what is measured, steps done, steps in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizeResult:
    """One block size. Rates in bytes per second of payload, medians over the rounds."""

    block_nbytes: int
    num_blocks: int
    num_rounds: int
    raw_threads: int
    inflight_nbytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    raw_read_bytes_per_s: float
    share_of_raw: float
    share_low: float
    share_high: float
    raw_vs_raw: float
    raw_vs_raw_low: float
    raw_vs_raw_high: float
    cpu_s_per_gb: float
    raw_cpu_s_per_gb: float
    verified: bool


class _Rig:
    """A file tier full of one chain of blocks, a store on top, and raw access to the same bytes."""

    def __init__(self, root: Path, *, block_nbytes: int, num_blocks: int) -> None:
        self.block_nbytes, self.num_blocks = block_nbytes, num_blocks
        self.memory_nbytes = num_blocks * align_up(block_nbytes)
        per_slab = max(1, (64 << 20) // slot_nbytes(block_nbytes))
        slab_nbytes = per_slab * slot_nbytes(block_nbytes)
        self.tier = FileTier(
            FileTierOptions(
                root=root,
                capacity_nbytes=-(-num_blocks // per_slab) * slab_nbytes,
                slab_nbytes=slab_nbytes,
            )
        )
        self.inflight_nbytes = inflight_nbytes(self.tier, root / "device.json")
        self.memory = MemoryTier(
            capacity_nbytes=self.memory_nbytes, slab_nbytes=align_up(block_nbytes)
        )
        transfer = Transfer("bench", inflight_nbytes=self.inflight_nbytes)
        self.store = PrefixStore(self.memory, [(self.tier, transfer)])
        layout = BlockLayout(block_size=1, axes="byte", shape=(block_nbytes,), dtype="uint8")
        namespace = Namespace(model="bench", weights="none", layout=layout)
        self.store.open_namespace(namespace)
        self.chain: KeyChain = block_keys(namespace, range(num_blocks))

    def fill(self) -> float:
        """Store all blocks and wait for the disk; returns bytes per second."""
        pattern = random.Random(0).randbytes(self.block_nbytes + self.num_blocks)
        with self.store.reserve(self.chain) as reservation:
            for number, view in enumerate(reservation.views):
                view[:] = self._content(pattern, number)
            started = time.monotonic()
            reservation.commit()
        self.store.flush()
        return self.num_blocks * self.block_nbytes / (time.monotonic() - started)

    def verify(self) -> bool:
        """Load all blocks cold and compare every byte with what was stored."""
        pattern = random.Random(0).randbytes(self.block_nbytes + self.num_blocks)
        self.forget_memory()
        with self.store.load(self.chain) as lease:
            views = lease.views
            return len(views) == self.num_blocks and all(
                view == self._content(pattern, number) for number, view in enumerate(views)
            )

    def load(self) -> float:
        """Seconds of one cold load of all blocks through the store."""
        self.forget_memory()
        started = time.monotonic()
        with self.store.load(self.chain) as lease:
            seconds = time.monotonic() - started
            if lease.ready_blocks != self.num_blocks:
                raise ConfigError(f"only {lease.ready_blocks} of {self.num_blocks} blocks loaded")
        return seconds

    def read_raw(self, num_threads: int) -> float:
        """Seconds of reading the payload of all blocks by plain preadv, in the chain's order."""
        self.forget_memory()
        records = self.tier.index.held()
        places = [int(offset) + HEADER_NBYTES for offset in sorted(records["offset"])]
        targets = [
            self.memory.view(n * align_up(self.block_nbytes), self.block_nbytes)
            for n in range(self.num_blocks)
        ]
        read, cursor = self.tier.volume.read, count().__next__

        def work() -> None:
            while (n := cursor()) < len(places):
                read(places[n], [targets[n]])

        threads = [threading.Thread(target=work) for _ in range(num_threads)]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - started

    def forget_memory(self) -> None:
        """Empty the memory tier, so that the next load is cold."""
        self.memory.discard(self.chain.keys[:1])

    def _content(self, pattern: bytes, number: int) -> memoryview:
        return memoryview(pattern)[number : number + self.block_nbytes]


def bench_block_size(
    root: Path, *, block_nbytes: int, total_nbytes: int, num_rounds: int, progress: Progress
) -> BlockSizeResult:
    """Measure one block size in a fresh directory under `root`, removed afterwards."""
    num_blocks = max(8, total_nbytes // block_nbytes)
    with scratch_root(root, num_blocks * slot_nbytes(block_nbytes)) as folder:
        rig = _Rig(folder / "tier", block_nbytes=block_nbytes, num_blocks=num_blocks)
        with rig.store:
            write_rate = rig.fill()
            verified = rig.verify()
            trials = {n: min(rig.read_raw(n) for _ in range(3)) for n in _THREADS}
            raw_threads = min(trials, key=trials.__getitem__)
            rounds = []
            for number in range(num_rounds):
                rounds.append(_round(rig, raw_threads, random.Random(number)))
                progress(f"{format_nbytes(block_nbytes)} blocks", number + 1, num_rounds)
    nbytes = num_blocks * block_nbytes
    share = median_with_interval([r.raw_s / r.load_s for r in rounds])
    noise = median_with_interval([r.raw_s / r.raw_again_s for r in rounds])
    return BlockSizeResult(
        block_nbytes=block_nbytes,
        num_blocks=num_blocks,
        num_rounds=num_rounds,
        raw_threads=raw_threads,
        inflight_nbytes=rig.inflight_nbytes,
        write_bytes_per_s=write_rate,
        read_bytes_per_s=nbytes / median_with_interval([r.load_s for r in rounds]).value,
        raw_read_bytes_per_s=nbytes / median_with_interval([r.raw_s for r in rounds]).value,
        share_of_raw=share.value,
        share_low=share.low,
        share_high=share.high,
        raw_vs_raw=noise.value,
        raw_vs_raw_low=noise.low,
        raw_vs_raw_high=noise.high,
        cpu_s_per_gb=median_with_interval([r.load_cpu_s for r in rounds]).value / nbytes * 1e9,
        raw_cpu_s_per_gb=median_with_interval([r.raw_cpu_s for r in rounds]).value / nbytes * 1e9,
        verified=verified,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    raw_s: float
    raw_again_s: float
    load_s: float
    raw_cpu_s: float
    load_cpu_s: float


def _round(rig: _Rig, raw_threads: int, order: random.Random) -> _Round:
    arms: dict[str, Callable[[], float]] = {
        "raw": lambda: rig.read_raw(raw_threads),
        "again": lambda: rig.read_raw(raw_threads),
        "load": rig.load,
    }
    names: list[str] = list(arms)
    order.shuffle(names)
    seconds, cpu_s = {}, {}
    for name in names:
        started = time.process_time()
        seconds[name] = arms[name]()
        cpu_s[name] = time.process_time() - started
    return _Round(
        raw_s=seconds["raw"],
        raw_again_s=seconds["again"],
        load_s=seconds["load"],
        raw_cpu_s=cpu_s["raw"],
        load_cpu_s=cpu_s["load"],
    )


@contextmanager
def scratch_root(root: Path, needed_nbytes: int) -> Iterator[Path]:
    """A fresh folder under `root` with room for `needed_nbytes`. Raises ConfigError without it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
        if needed_nbytes + (64 << 20) > free:
            raise ConfigError(
                f"{root}: the benchmark needs {format_nbytes(needed_nbytes)}, "
                f"{format_nbytes(free)} are free; name another --root or a smaller --total"
            )
        folder = Path(tempfile.mkdtemp(prefix="headstart-bench-", dir=root))
    except OSError as error:
        raise ConfigError(f"{root} cannot be used for the benchmark: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def bench_block_sizes(
    root: Path,
    *,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    total_nbytes: int = 256 << 20,
    num_rounds: int = 15,
    progress: Progress = lambda what, done, total: None,
) -> list[BlockSizeResult]:
    """Measure each block size with `total_nbytes` of payload a round. Raises ConfigError."""
    os.sync()  # writes of earlier work would compete with the first reads
    return [
        bench_block_size(
            root,
            block_nbytes=block_nbytes,
            total_nbytes=total_nbytes,
            num_rounds=num_rounds,
            progress=progress,
        )
        for block_nbytes in block_sizes
    ]
