"""Replays a trace against a cache of a capacity: any policy, request by request.

A request finds the prefix of its blocks that is held, uses it, and then stores the rest, in order,
evicting leaves for room as the store does (`headstart.index`, `headstart.room`): never what it just
hit, and where too little may go, the end of its prompt is not stored. Policies are the store's own
objects behind the store's own queues of leaves. One request is served at a time.

    lfu      fewest hits first, then the oldest use: what was popular once stays. Only simulated
    sieve    Zhang et al. 2024 over leaves: `headstart.tuner.sieve`. Only simulated
    optimal  knows the future: what is used next the latest goes, or is not stored at all. No policy
             has more block hits: see `optimal_hits`
"""

from __future__ import annotations

import heapq

import numpy as np

from headstart.errors import ConfigError
from headstart.policies import POLICIES, make_policy
from headstart.policies.base import CLOCK_BITS, pack
from headstart.tuner.cache import Cache, Now
from headstart.tuner.curve import Rates, blocks_in_sample
from headstart.tuner.recorded import Advance, Ints, Recorded, each_request
from headstart.tuner.sieve import sieve_hits


class LfuPolicy:
    """Evicts the leaf with the fewest hits, of those the one whose last use is oldest."""

    name = "lfu"

    def on_insert(self, *, row: int, clock: int) -> int:
        """No hit yet, and the present."""
        return clock

    def on_hit(self, *, row: int, priority: int, clock: int) -> int:
        """One hit more, and the present."""
        return pack((priority >> CLOCK_BITS) + 1, clock)


def names() -> tuple[str, ...]:
    """Of all that can be simulated."""
    return (*POLICIES, "lfu", "sieve", "optimal")


def simulate(
    recorded: Recorded, name: str, capacity_blocks: int, advance: Advance = lambda done: None
) -> Ints:
    """Blocks of each request that are hits, a prefix of it. Raises ConfigError.

    `name` is one of `names()`; those of the store take a number as in settings, as `"ttl=10min"`.
    `capacity_blocks` of a cache for the whole trace, of which `recorded` may be a sample.
    """
    if capacity_blocks < 0:
        raise ConfigError(f"a capacity of {capacity_blocks} blocks is below none")
    capacity_blocks = blocks_in_sample(recorded, capacity_blocks)
    if name == "sieve":
        return sieve_hits(recorded, capacity_blocks, advance)
    if name == "optimal":
        return optimal_hits(recorded, capacity_blocks, advance)
    if name.partition("=")[0] not in names():
        raise ConfigError(f"policy {name!r} is unknown; known: {', '.join(names())}")
    now = Now()
    policy = LfuPolicy() if name == "lfu" else make_policy(name, clock=now)
    cache = Cache(recorded.parent.tolist(), policy, capacity_blocks, recorded.block_size)
    found = np.zeros(len(recorded), np.int32)
    at_s = recorded.at_s.tolist()
    for number, blocks in each_request(recorded, advance):
        now.seconds = at_s[number]
        found[number] = held = cache.held(blocks)
        cache.touch(blocks[:held])
        if held < len(blocks):
            cache.store(blocks[held:], blocks[:held][-1:])
    return found


def rates(recorded: Recorded, hits: Ints, first_request: int = 0) -> Rates:
    """What `simulate` gave as shares, of the requests from `first_request` on."""
    tokens = recorded.prefix_tokens(hits)[first_request:]
    return Rates(
        block_hit=int(hits[first_request:].sum())
        / max(1, int(recorded.lengths[first_request:].sum())),
        token_hit=int(tokens.sum()) / max(1, int(recorded.input_tokens[first_request:].sum())),
    )


def optimal_hits(recorded: Recorded, capacity_blocks: int, advance: Advance) -> Ints:
    """Hits of a cache that knows the future (Belady 1966, with the choice not to store).

    After each request the blocks stay that are used again the soonest. Each stay, from one use to
    the next, takes one place; of stays that are too many at once the one that ends last is given
    up, which leaves the most (interval scheduling). A parent is used no later than its child, so
    with ties broken by depth what stays are whole prefixes, and the last of them is a leaf.
    """
    depth_bits = int(recorded.lengths.max(initial=0)).bit_length()
    rank = _next_uses(recorded) << depth_bits
    is_last = rank < 0
    lengths = recorded.lengths
    rank += np.arange(len(rank)) - np.repeat(recorded.starts[:-1], lengths)
    rank[is_last] = -1
    starts = recorded.starts.tolist()
    kept = [-1] * len(recorded.parent)  # the rank of a held block
    heap: list[tuple[int, int]] = []
    num_held = 0
    found = np.zeros(len(recorded), np.int32)
    for number, blocks in each_request(recorded, advance):
        ranks = rank[starts[number] : starts[number + 1]].tolist()
        held = 0
        while held < len(blocks) and kept[blocks[held]] >= 0:
            held += 1
        found[number] = held
        for index, (block, rank_now) in enumerate(zip(blocks, ranks, strict=True)):
            num_held += (rank_now >= 0) - (index < held)
            kept[block] = rank_now
            if rank_now >= 0:
                heapq.heappush(heap, (-rank_now, block))
        while num_held > capacity_blocks:
            negative, block = heapq.heappop(heap)
            if kept[block] == -negative:  # else it was used since
                kept[block] = -1
                num_held -= 1
    return found


def _next_uses(recorded: Recorded) -> Ints:
    """The number of the request that uses each reference's block next; -1: none does."""
    by_block = np.argsort(recorded.blocks, kind="stable")
    request = np.repeat(np.arange(len(recorded), dtype=np.int64), recorded.lengths)[by_block]
    is_same = recorded.blocks[by_block[1:]] == recorded.blocks[by_block[:-1]]
    found = np.full(len(by_block), -1, np.int64)
    found[by_block[:-1][is_same]] = request[1:][is_same]
    return found
