"""The hit rate of leaf-first LRU at every capacity, from one pass over a trace.

Take an LRU stack on which a request puts its blocks last to first, so that its first block lies on
top. Then a parent lies above its children at any time: whatever uses a child uses the parent, and
puts it on later. So the lowest of the first C blocks of the stack is a leaf among them, and
evicting the coldest leaf keeps just those C. A request finds what lies among the first C *before*
it puts anything on. Hence a block is a hit at every capacity from its depth then, and the depths
of a prompt rise along it: hits are a prefix (Mattson et al. 1970, by request, not by reference).

The depth is the number of different blocks put on since this one was, plus one. With `before[j]`
the last place in the stream where block j was put on, or -1, the different blocks between
p = before[i] and i are the j in between with before[j] < p. All j <= p have that, too, so they are
counted from the start, for all i at once, by `count_smaller_before`. Those of the request itself
are the blocks behind this one in its prompt; each was put on before p, so is counted, and is taken
off again.

Checked against a simulation with the store's policy object, and with the store's index (tests).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headstart.tuner.recorded import Ints, Recorded

NEVER = np.iinfo(np.int32).max
"""The depth of a block that was not used before."""


def count_smaller_before(order: Ints) -> Ints:
    """At each place of a permutation of `range(n)`, how many smaller values stand before it.

    `order` is its inverse: the places by rising value. Splits places by their bits, highest first:
    values stay sorted within each half, and whoever goes right counts those of its group that went
    left before it. O(n log n) in array operations.
    """
    n = len(order)
    found = np.zeros(n, np.int32)
    order = order.astype(np.int32)
    index = np.arange(n, dtype=np.int32)
    for bit in reversed(range(max(0, n - 1).bit_length())):
        is_right = (order >> bit & 1).astype(bool)
        group = index >> (bit + 1) << (bit + 1)
        # All groups before this one are full, so half of their places went left.
        num_left = np.cumsum(~is_right, dtype=np.int32) - ~is_right - (group >> 1)
        found[order[is_right]] += num_left[is_right]
        to = np.where(is_right, index + (1 << bit) - num_left, group + num_left)
        split = np.empty_like(order)
        split[to] = order
        order = split
    return found


def last_use(stream: Ints) -> Ints:
    """The place of the use before, of each use of something in a stream; -1: there is none."""
    by_block = np.argsort(stream, kind="stable")
    found = np.full(len(stream), -1, np.int32)
    is_same = stream[by_block[1:]] == stream[by_block[:-1]]
    found[by_block[1:][is_same]] = by_block[:-1][is_same]
    return found


def depths(recorded: Recorded) -> Ints:
    """The least capacity, in blocks, at which each of `recorded.blocks` is a hit; NEVER: none."""
    n = len(recorded.blocks)
    lengths = recorded.lengths
    place = np.arange(n, dtype=np.int32)
    turned = np.repeat(recorded.starts[:-1] + recorded.starts[1:] - 1, lengths).astype(np.int32)
    turned -= place  # its own inverse: last to first within a request
    before = last_use(recorded.blocks[turned])
    is_used_again = before >= 0
    after = np.full(n, -1, np.int32)
    after[before[is_used_again]] = place[is_used_again]
    order: Ints = np.concatenate((np.flatnonzero(~is_used_again), after[after >= 0]))
    found = count_smaller_before(order) - before
    found -= place - np.repeat(recorded.starts[:-1], lengths).astype(np.int32)
    found[~is_used_again] = NEVER
    result: Ints = found[turned]
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Shares of blocks and tokens that were hits."""

    block_hit: float
    token_hit: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """Hits of some requests at every capacity."""

    blocks: Ints
    """Number of blocks that are hits at a capacity of 0, 1, ... blocks."""
    tokens: Ints
    num_blocks: int
    num_tokens: int

    def at(self, capacity_blocks: int) -> Rates:
        """The hits at a capacity."""
        index = min(capacity_blocks, len(self.blocks) - 1)
        return Rates(
            block_hit=int(self.blocks[index]) / max(1, self.num_blocks),
            token_hit=int(self.tokens[index]) / max(1, self.num_tokens),
        )

    @property
    def infinite(self) -> Rates:
        """The hits of a cache that holds all."""
        return self.at(len(self.blocks))

    @property
    def enough_blocks(self) -> int:
        """The least capacity that has all those hits."""
        return len(self.blocks) - 1


def lru_curve(recorded: Recorded, found: Ints, first_request: int = 0) -> Curve:
    """The curve of the requests from `first_request` on, given the `depths` of all."""
    start = int(recorded.starts[first_request])
    is_hit = found[start:] != NEVER
    hits = found[start:][is_hit]
    weights = recorded.tokens()[start:][is_hit]
    size = int(hits.max(initial=0)) + 1
    # Sums of whole numbers below 2**53: exact as floats.
    tokens = np.bincount(hits, weights, minlength=size).astype(np.int64)
    return Curve(
        blocks=np.cumsum(np.bincount(hits, minlength=size)),
        tokens=np.cumsum(tokens),
        num_blocks=len(found) - start,
        num_tokens=int(recorded.input_tokens[first_request:].sum()),
    )
