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
from functools import lru_cache

import numpy as np

from headstart.errors import ConfigError
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
    """The least capacity, in blocks, at which each of `recorded.blocks` is a hit; NEVER: none.

    Raises ConfigError for a sample, which tells only about so many: see `depth_steps`.
    """
    if recorded.share != 1.0:
        raise ConfigError("this needs the whole trace, and a sample was read: leave out --sample")
    return stack_depths(recorded.blocks, recorded.starts)


def depth_steps(recorded: Recorded) -> Ints:
    """The same in steps of `step_of(recorded)` blocks, also of a sample.

    Then as it would be for the whole trace: see `_of_all`.
    """
    if recorded.share == 1.0:
        return depths(recorded)
    return _of_all(recorded, stack_depths(recorded.blocks, recorded.starts))


def step_of(recorded: Recorded) -> int:
    """Blocks of a step of capacity: a sample cannot tell finer ones."""
    return max(1, int(1.0 / recorded.share))


def stack_depths(blocks: Ints, starts: Ints) -> Ints:
    """The depth of each of `blocks` in the stack when its request comes; NEVER: it is new."""
    n = len(blocks)
    lengths = np.diff(starts)
    place = np.arange(n, dtype=np.int32)
    turned = np.repeat(starts[:-1] + starts[1:] - 1, lengths).astype(np.int32)
    turned -= place  # its own inverse: last to first within a request
    before = last_use(blocks[turned])
    is_used_again = before >= 0
    after = np.full(n, -1, np.int32)
    after[before[is_used_again]] = place[is_used_again]
    order: Ints = np.concatenate((np.flatnonzero(~is_used_again), after[after >= 0]))
    found = count_smaller_before(order) - before
    found -= place - np.repeat(starts[:-1], lengths).astype(np.int32)
    found[~is_used_again] = NEVER
    result: Ints = found[turned]
    return result


def _of_all(recorded: Recorded, found: Ints) -> Ints:
    """Depths in a sample of sessions, `found`, as they would be in the whole trace.

    Of what lies above a block, the blocks of other sessions stand for `1 / share` times as many.
    Those of its own session are all there, and so are common ones, of several sessions:

        common + own + (others) / share

    Common blocks themselves are used again sooner in the whole trace, by as much as there is more
    between two uses; their depths stay.
    """
    session = np.repeat(recorded.session, recorded.lengths)
    owner = np.zeros(len(recorded.parent), session.dtype)
    owner[recorded.blocks] = session
    is_common = np.zeros(len(recorded.parent), bool)
    is_common[recorded.blocks[owner[recorded.blocks] != session]] = True
    is_one = ~is_common[recorded.blocks]  # of one session
    blocks, starts = recorded.blocks[is_one], np.append(0, np.cumsum(is_one))[recorded.starts]
    both = found[is_one] if is_one.all() else stack_depths(blocks, starts)
    own = _own_depths(blocks, starts, recorded.session)
    common = found[is_one] - both.astype(np.int64)
    all_ = common + own + (both - own) / recorded.share
    is_new = both == NEVER
    result = found.astype(np.float64)
    result[is_one] = all_
    steps = np.ceil(result / step_of(recorded)).astype(np.int32)
    new = found == NEVER
    new[is_one] = is_new
    steps[new] = NEVER
    return steps


def _own_depths(blocks: Ints, starts: Ints, session: Ints) -> Ints:
    """Depths of blocks that one session uses each, in stacks of a session."""
    order = np.argsort(session, kind="stable")
    lengths = np.diff(starts)[order]
    moved_starts = np.append(0, np.cumsum(lengths))
    moved = np.arange(moved_starts[-1]) + np.repeat(starts[:-1][order] - moved_starts[:-1], lengths)
    found = np.empty(len(blocks), np.int32)
    found[moved] = stack_depths(blocks[moved], moved_starts)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Shares of blocks and tokens that were hits."""

    block_hit: float
    token_hit: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """Hits of some requests at every capacity."""

    blocks: Ints
    """Number of blocks that are hits at a capacity of 0, 1, ... steps."""
    tokens: Ints
    num_blocks: int
    num_tokens: int
    step: int = 1
    """Blocks of capacity."""

    def at(self, capacity_blocks: int) -> Rates:
        """The hits at a capacity."""
        index = min(capacity_blocks // self.step, len(self.blocks) - 1)
        return Rates(
            block_hit=int(self.blocks[index]) / max(1, self.num_blocks),
            token_hit=int(self.tokens[index]) / max(1, self.num_tokens),
        )

    @property
    def infinite(self) -> Rates:
        """The hits of a cache that holds all."""
        return self.at(self.enough_blocks)

    @property
    def enough_blocks(self) -> int:
        """The least capacity that has all those hits."""
        return (len(self.blocks) - 1) * self.step


def lru_curve(recorded: Recorded, found: Ints, first_request: int = 0) -> Curve:
    """The curve of the requests from `first_request` on, given the `depth_steps` of all."""
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
        step=step_of(recorded),
    )


def blocks_in_sample(recorded: Recorded, capacity_blocks: int) -> int:
    """The capacity at which a sample behaves as the whole trace does at `capacity_blocks`.

    Not a share of it, since the blocks of a session are all there: that at which `lru` hits as much
    of the sample as is estimated for all.
    """
    if recorded.share == 1.0:
        return capacity_blocks
    estimated, found = _both(recorded)
    num_hits = int(
        estimated.blocks[min(capacity_blocks // estimated.step, len(estimated.blocks) - 1)]
    )
    return int(found[num_hits - 1]) if num_hits else 0


@lru_cache(maxsize=1)
def _both(recorded: Recorded) -> tuple[Curve, Ints]:
    """The curve that a sample stands for, and its own depths, sorted."""
    found: Ints = np.sort(stack_depths(recorded.blocks, recorded.starts))
    return lru_curve(recorded, depth_steps(recorded)), found
