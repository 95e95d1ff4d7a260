"""Replays a trace against memory above a file tier: what each serves, and what the SSD has to take.

    request   [0, m)  memory holds      [m, h)  the file tier holds      [h, n)  computed
    memory    uses [0, m), takes [m, n): promoted, computed, as far as there is room for them
    files     use what they serve, and take what the write policy says, from memory

Both evict leaves by the policy, and nothing that the request hit (`headstart.tuner.cache`). A
prompt that is longer than memory is hit and stored as far as memory has room, as in the store.
Where memory has 0 blocks, the file tier serves and is written without it. What is written, and why:

    through       what the store does. `new`: every new block, at once. `lost`: what memory holds
                  and files have evicted, at its next use
    on-evict      `evicted`: what memory evicts. `above`: the blocks above that, which a file tier
                  must hold, too, since the store takes no block without its parent
    second-touch  `used again`: at the second use, be it a hit or computed once more. Takes a list
                  of all blocks that were used, or with a TTL of those used within it

Inclusive tiers: what is promoted stays in the file tier. Exclusive ones, which are only written
`on-evict`: it leaves, so that a block is in one of them and capacities add up. A block of the file
tier may then have its parent in memory, so that nothing is written for being `above`.

What memory takes depends on no file tier: a request leaves the same blocks there, be they read or
computed. So where only the order of uses counts, as with `lru` and `fifo`, `memory_hits` are those
of `simulate`, whatever is written. To others what is read comes first, as in the store.

Several engines have a memory each, and share one file tier. Sessions are dealt to them in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headstart.errors import ConfigError
from headstart.policies import make_policy
from headstart.tuner.cache import Cache, Now
from headstart.tuner.recorded import NO_PARENT, Advance, Ints, Recorded, each_request

THROUGH, ON_EVICT, SECOND_TOUCH = "through", "on-evict", "second-touch"
WRITES = (THROUGH, ON_EVICT, SECOND_TOUCH)
CAUSES = ("new", "lost", "evicted", "above", "used again")
MAX_ENGINES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSetup:
    """What is simulated. Raises ConfigError."""

    memory_blocks: int
    """Of each engine."""
    file_blocks: int
    policy: str = "lru"
    """Of both tiers: any of the store's, with its number if it has one."""
    write: str = THROUGH
    """One of WRITES."""
    inclusive: bool = True
    ttl_s: float | None = None
    """A block that no request used for longer is held nowhere, and not written any more."""
    engines: int = 1

    def __post_init__(self) -> None:
        if min(self.memory_blocks, self.file_blocks) < 0:
            raise ConfigError(
                f"capacities of {self.memory_blocks} and {self.file_blocks} blocks: none is below 0"
            )
        make_policy(self.policy)
        if self.write not in WRITES:
            raise ConfigError(f"write policy {self.write!r} is unknown; known: {', '.join(WRITES)}")
        if not self.inclusive and self.write != ON_EVICT:
            raise ConfigError(
                f"exclusive tiers are written {ON_EVICT}: {self.write} would have blocks in both"
            )
        if self.ttl_s is not None and not self.ttl_s > 0.0:
            raise ConfigError(f"a TTL is above 0 s, not {self.ttl_s}; without one nothing expires")
        if not 1 <= self.engines <= MAX_ENGINES:
            raise ConfigError(f"{self.engines} engines cannot be simulated; 1 to {MAX_ENGINES} can")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TierResult:
    """What came of it. Of requests: one number each, in blocks."""

    setup: TierSetup
    memory_hits: Ints
    file_hits: Ints
    """Beyond those in memory: the blocks that are read from the SSD."""
    written_by_cause: dict[str, int]
    """Blocks written to the file tier, by each of CAUSES."""
    rewritten_blocks: int
    """Of all that were written: those that had been written before."""

    @property
    def hits(self) -> Ints:
        """Blocks at the start of each request that are hits."""
        found: Ints = self.memory_hits + self.file_hits
        return found

    @property
    def written_blocks(self) -> int:
        """To the file tier."""
        return sum(self.written_by_cause.values())

    @property
    def read_blocks(self) -> int:
        """From the file tier."""
        return int(self.file_hits.sum(dtype=np.int64))


def simulate_tiers(
    recorded: Recorded, setup: TierSetup, advance: Advance = lambda done: None
) -> TierResult:
    """Replay it, one request at a time. Takes about 70 bytes a block, and 15 a further engine."""
    tiers = _Tiers(recorded, setup)
    engine = (recorded.session % setup.engines).tolist()
    memory_hits, file_hits = (np.zeros(len(recorded), np.int32) for _ in range(2))
    for number, blocks in each_request(recorded, advance):
        memory_hits[number], file_hits[number] = tiers.request(number, engine[number], blocks)
    return TierResult(
        setup=setup,
        memory_hits=memory_hits,
        file_hits=file_hits,
        written_by_cause=tiers.files.written,
        rewritten_blocks=tiers.files.num_rewritten,
    )


class _Files:
    """The file tier, and what was written to it."""

    def __init__(self, cache: Cache, parent: list[int]) -> None:
        self.cache, self._parent = cache, parent
        self.written = dict.fromkeys(CAUSES, 0)
        self.num_rewritten = 0
        self._was_written = bytearray(len(parent))

    def write(self, new: list[int], pinned: Sequence[int]) -> list[int]:
        """Write a run of blocks as far as there is room; returns what was."""
        num_stored, _ = self.cache.store(new, pinned) if new else (0, [])
        stored, was_written = new[:num_stored], self._was_written
        for block in stored:
            self.num_rewritten += was_written[block]
            was_written[block] = 1
        return stored

    def write_rooted(self, block: int, pinned: list[int], evicted: set[int]) -> None:
        """Write an evicted block, with what is not held of all above it."""
        chain = []
        while block != NO_PARENT and not self.cache.is_held[block]:
            chain.append(block)
            block = self._parent[block]
        above = [] if block == NO_PARENT else [block]
        for each in self.write(chain[::-1], above + pinned):
            self.written["evicted" if each in evicted else "above"] += 1


class _Tiers:
    """Memory of each engine, and the file tier that they share."""

    def __init__(self, recorded: Recorded, setup: TierSetup) -> None:
        self._recorded, self._setup = recorded, setup
        self._parent = parent = recorded.parent.tolist()
        self._now = Now()
        self._memories = [self._cache(setup.memory_blocks) for _ in range(setup.engines)]
        self.files = _Files(self._cache(setup.file_blocks), parent)
        # Without memory nothing could leave the file tier.
        self._is_inclusive = setup.inclusive or not setup.memory_blocks
        self._has_uses = setup.ttl_s is not None or setup.write == SECOND_TOUCH
        self._last_use = np.full(len(parent), -1, np.int32)
        """The last request that used each block; -1: none did, or it has expired."""
        self._num_expired = 0
        """Requests whose blocks have expired, if not used since."""

    def _cache(self, capacity_blocks: int) -> Cache:
        policy = make_policy(self._setup.policy, clock=self._now)
        return Cache(self._parent, policy, capacity_blocks, self._recorded.block_size)

    def request(self, number: int, engine: int, blocks: list[int]) -> tuple[int, int]:
        """Serve one; returns the blocks hit in memory, and from files beyond those."""
        setup, memory, files = self._setup, self._memories[engine], self.files.cache
        self._now.seconds = float(self._recorded.at_s[number])
        if setup.ttl_s is not None:
            self._expire(self._now.seconds - setup.ttl_s)
        in_memory = memory.held(blocks)
        memory.touch(blocks[:in_memory])
        end = min(len(blocks), setup.memory_blocks or len(blocks))
        in_files = files.held(blocks, 0 if self._is_inclusive else in_memory)
        num_hits = max(in_memory, in_files)  # no more than `end`: nothing deeper is ever stored
        if not self._is_inclusive:
            for block in blocks[in_memory:num_hits]:
                files.remove(block)
        elif in_files > in_memory:
            files.touch(blocks[in_memory:num_hits])  # what is read; in the store, too
        else:
            files.touch(blocks[:in_files])
        evicted: list[int] = []
        if setup.memory_blocks:
            evicted = self._take(memory, blocks, (in_memory, num_hits, end))
        self._write(blocks[:end], in_memory, in_files, evicted)
        if self._has_uses:
            self._last_use[blocks] = number
        return in_memory, num_hits - in_memory

    def _take(self, memory: Cache, blocks: list[int], ends: tuple[int, int, int]) -> list[int]:
        """Store what is read, and behind it what is computed; returns what was evicted for it."""
        evicted: list[int] = []
        for start, end in pairwise(ends):
            num_stored, gone = memory.store(blocks[start:end], blocks[:start][-1:])
            evicted += gone
            if num_stored < end - start:
                break
        return evicted

    def _write(self, blocks: list[int], in_memory: int, in_files: int, evicted: list[int]) -> None:
        """Write what the policy says of what a request stored, `blocks`, and what it evicted."""
        files, last = self.files, blocks[:in_files][-1:]
        if self._setup.write == SECOND_TOUCH:
            # Whoever used a block used its parent, so these are the first ones.
            num_used = int(np.count_nonzero(self._last_use[blocks] >= 0))
            written = files.write(blocks[in_files:num_used], last)
            files.written["used again"] += len(written)
        elif self._setup.write == THROUGH or not self._setup.memory_blocks:
            kept = max(in_files, in_memory)
            num_lost = len(files.write(blocks[in_files:kept], last))
            files.written["lost"] += num_lost
            if num_lost == kept - in_files:
                new = files.write(blocks[kept:], blocks[:kept][-1:])
                files.written["new"] += len(new)
        elif self._is_inclusive:
            gone = set(evicted)
            for block in evicted:
                if not files.cache.is_held[block]:
                    files.write_rooted(block, last, gone)
        else:
            for run in self._runs(evicted):
                new = [block for block in run if not files.cache.is_held[block]]
                files.written["evicted"] += len(files.write(new, ()))

    def _runs(self, evicted: list[int]) -> Iterator[list[int]]:
        """What was evicted from the end of a prompt upwards, each in the order of the prompt."""
        start = 0
        for end in range(1, len(evicted) + 1):
            if end == len(evicted) or self._parent[evicted[end - 1]] != evicted[end]:
                yield evicted[start:end][::-1]
                start = end

    def _expire(self, before_s: float) -> None:
        """Forget what no request used since `before_s`: last to first, so that leaves go first."""
        at_s, starts, blocks = self._recorded.at_s, self._recorded.starts, self._recorded.blocks
        caches = [*self._memories, self.files.cache]
        while at_s[self._num_expired] < before_s:
            number = self._num_expired
            self._num_expired += 1
            used = blocks[starts[number] : starts[number + 1]]
            unused = used[self._last_use[used] == number]
            self._last_use[unused] = -1
            for block in reversed(unused.tolist()):
                for cache in caches:
                    if cache.is_held[block]:
                        cache.remove(block)
