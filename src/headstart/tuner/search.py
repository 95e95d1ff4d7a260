"""Which settings of the cache are worth their price: tried one by one, and compared.

First capacities: each memory with each file tier, in the trace's blocks, with `lru` and the
planner. Then, at the knee of those, block sizes, policies, and loading all that is held, each with
each. All combinations take longer and are tried where that is asked for.

    front   what nothing beats: no other setting is as good in TTFT at p50 and p99, in the rate
            that can be served, in the service level if there is one, and in price
    knee    of the front, by price: the cheapest setting from which on no dearer one is better by
            what is worth it for each doubling of the price, by default a tenth. Better is less of
            p50, p99 and the time that a request takes of the busiest part, in geometric mean: so
            a queue that grows without a cache does not make all else look small. Of those that
            save GPU seconds for no less than they cost, where prices are known and any do

With a service level the cheapest that meets it is taken instead, or what comes next to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from headstart.tuner.case import Case, Setting, Timed
from headstart.tuner.latency import Loads
from headstart.tuner.simulate import names
from headstart.tuner.tune import ONLY_SIMULATED, Tuned
from headstart.units import PAGE_NBYTES, align_up

Advance = Callable[[str, int, int], None]
_POLICIES = ("lru", "fifo")
"""That are compared in any case."""
_BLOCK_SIZE_MAX = 256
_FACTORS = (1, 2, 4, 8, 16)
_LARGE_FACTOR = 4
_MEMORY_PARTS, _FILE_PARTS = (64, 16, 4, 1), (8, 4, 2, 1)
"""Of what holds all that can be hit."""
TIME_GAIN = 0.1
"""By which a doubling of the price has to make times shorter."""
MET_SHARE = 0.99
"""Of the requests, with which a service level is met."""
_BETTER = 0.005
"""By which another setting of the same price has to be better than what one expects."""
_LATER = 1.005
"""A p99 that is not later by more is not later."""
_ROUND = ((64 << 30, 1 << 30), (64 << 20, 1 << 20), (0, PAGE_NBYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What is tried."""

    memory: tuple[int, ...]
    """Bytes, each above 0."""
    file: tuple[int, ...]
    """Bytes; 0: none."""
    block_sizes: tuple[int, ...]
    policies: tuple[str, ...]
    all_combinations: bool = False

    def capacities(self, block_size: int) -> list[Setting]:
        """Each memory with each file tier; one that is smaller than the memory adds nothing."""
        return [
            Setting(memory_nbytes=memory, file_nbytes=file, block_size=block_size)
            for memory, file in product(self.memory, self.file)
            if not file or file > memory
        ]

    def ways(self, setting: Setting) -> list[Setting]:
        """Its capacities with all block sizes and policies, with the planner and without."""
        return [
            replace(setting, block_size=size, policy=policy, loads=loads)
            for size, policy, loads in product(self.block_sizes, self.policies, Loads)
        ]


def default_space(
    case: Case,
    tuned: Tuned,
    *,
    memory: Sequence[int] = (),
    file: Sequence[int] | None = None,
    block_sizes: Sequence[int] = (),
    policies: Sequence[str] = (),
    all_combinations: bool = False,
) -> Space:
    """What is asked for, and where nothing is, parts of what all possible hits need.

    File tiers also have the capacity of the knee of hits. Raises ConfigError for what cannot be.
    """
    recorded = case.recorded
    size, token = recorded.block_size, case.site.block_nbytes(recorded.block_size)
    enough = tuned.cold.enough_blocks * token
    sizes = tuple(sorted(set(block_sizes))) or _block_sizes(size)
    if not memory:
        # Blocks that are read pass through it, and at most half of it is for prompts that wait.
        least = 2 * case.longest_nbytes(sizes[-1])
        memory = [_rounded(max(enough // part, least)) for part in _MEMORY_PARTS if enough]
    if file is None:
        hits_knee = (tuned.advice.capacity_tokens or 0) // size * token
        file = [0, *(_rounded(enough // part) for part in _FILE_PARTS), _rounded(hits_knee)]
    space = Space(
        memory=tuple(sorted(set(memory))),
        file=tuple(sorted(set(file))),
        block_sizes=sizes,
        policies=tuple(dict.fromkeys([*policies, *_POLICIES])),
        all_combinations=all_combinations,
    )
    for block_size in space.block_sizes:
        for each in space.capacities(block_size):
            case.check(each)
    return space


def _rounded(nbytes: int) -> int:
    """Up to what people write."""
    unit = next(unit for least, unit in _ROUND if nbytes >= least)
    return align_up(nbytes, unit)


def _block_sizes(own: int) -> tuple[int, ...]:
    most = max(_BLOCK_SIZE_MAX, _LARGE_FACTOR * own)
    return tuple(own * factor for factor in _FACTORS if own * factor <= most)


def search(
    case: Case, space: Space, *, time_gain: float = TIME_GAIN, advance: Advance
) -> Iterator[Timed]:
    """Each setting that is tried, as soon as it is timed; the first one is no cache at all."""
    num_requests = len(case.recorded)
    own = case.recorded.block_size
    grid = space.capacities(own)
    if space.all_combinations:
        grid = list(dict.fromkeys(way for each in grid for way in space.ways(each)))
        num_ways = 0
    else:
        num_ways = len(space.ways(case.without))
    todo = [case.without, *grid]
    total = (len(todo) + (num_ways if grid else 0)) * num_requests
    tried: list[Timed] = []

    def run(setting: Setting) -> Timed:
        before = len(tried) * num_requests
        what = f"timing {len(tried) + 1:,}"
        advance(what, before, total)
        timed = case.time(setting, lambda done: advance(what, before + done, total))
        tried.append(timed)
        return timed

    for setting in todo:
        yield run(setting)
    best = recommended(tried, time_gain)
    if num_ways and best is not None:
        known = {each.setting for each in tried}
        for setting in space.ways(best.setting):
            if setting not in known:
                yield run(setting)


def front(tried: Sequence[Timed]) -> list[Timed]:
    """What nothing beats, of what can be run, by price. Differences that are not printed are none.

    What is only better by a hair than the same with `lru` and the planner, stands back for that.
    """
    found: list[Timed] = []
    runnable = [each for each in tried if each.setting.policy not in ONLY_SIMULATED]
    ranked = sorted(runnable, key=lambda each: (_aims(each), _surprise(each.setting)))
    for each in ranked:
        aims = _aims(each)
        if not any(all(a <= b for a, b in zip(_aims(other), aims, strict=True)) for other in found):
            found.append(each)
    by_setting = {each.setting: each for each in runnable}
    for index, each in enumerate(found):
        usual = by_setting.get(replace(each.setting, policy="lru", loads=Loads.PLANNED))
        if usual is not None and usual not in found and gain(usual, each) <= _BETTER:
            found[index] = usual
    return sorted(found, key=lambda each: (each.weight, _surprise(each.setting)))


def _aims(timed: Timed) -> tuple[float, ...]:
    """What should be small."""
    latency = timed.latency
    setting = timed.setting
    aims = [latency.p50_s, latency.p99_s, -latency.most_per_s, -(latency.slo_share or 0.0)]
    if timed.cost_month is not None:
        aims.append(timed.cost_month)
    else:
        aims += [setting.memory_nbytes, setting.file_nbytes]
    return tuple(float(f"{each:.3g}") for each in aims)


def _surprise(setting: Setting) -> tuple[bool, int, int]:
    """Of equal settings, the planner, `lru` and large blocks are what one expects."""
    policy = names().index(setting.policy.partition("=")[0])
    return setting.loads is not Loads.PLANNED, policy, -setting.block_size


def recommended(tried: Sequence[Timed], time_gain: float = TIME_GAIN) -> Timed | None:
    """The knee, or what meets the service level. None: no cache, with which `tried` begins.

    A setting whose p99 is later than without a cache is none of them.
    """
    without = tried[0]
    good = [each for each in front(tried) if each.latency.p99_s <= _LATER * without.latency.p99_s]
    if without.latency.slo_share is not None:
        # The first of the best: they come by price.
        best = max(good, key=lambda each: min(each.latency.slo_share or 0.0, MET_SHARE))
    else:
        paying = [each for each in good if each.pays]
        best = knee(paying if len(paying) > 1 else good, time_gain)  # no cache costs nothing
    return None if best is without else best


def knee(ranked: Sequence[Timed], time_gain: float) -> Timed:
    """See the module; of settings by price, at least one."""
    steps = [ranked[0]]
    for each in ranked[1:]:
        better = gain(steps[-1], each)
        if each.weight == steps[-1].weight:
            if better > _BETTER:
                steps[-1] = each
        elif better > 0.0:
            steps.append(each)
    best = steps[0]
    for number, (here, after) in enumerate(pairwise(steps)):
        if any(_is_worth(here, each, time_gain) for each in steps[number + 1 :]):
            best = after
    return best


def _is_worth(here: Timed, dearer: Timed, time_gain: float) -> bool:
    doublings = math.log2(dearer.weight / here.weight) if here.weight else 1.0
    least = 1.0 - math.pow(1.0 - time_gain, max(1.0, doublings))
    return gain(here, dearer) >= least


def gain(one: Timed, other: Timed) -> float:
    """By what share the other's times are shorter: see the module."""
    ratio = (
        (other.latency.p50_s / one.latency.p50_s)
        * (other.latency.p99_s / one.latency.p99_s)
        * (one.latency.most_per_s / other.latency.most_per_s)
    )
    return 1.0 - math.cbrt(ratio)
