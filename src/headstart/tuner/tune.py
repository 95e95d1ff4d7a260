"""How much capacity, which policy and which block size: hits of a trace at several of each.

The curve of `lru` is exact at every capacity; other policies are simulated at the points that are
asked for. The *knee* is the least capacity from which on doubling it never again adds a share of
the tokens that is worth it, by default two per cent: in the last half of the requests, where the
cache is no longer cold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from headstart.errors import ConfigError
from headstart.tuner.curve import Curve, Rates, depth_steps, lru_curve
from headstart.tuner.facts import Infinite, half, infinite, infinite_document
from headstart.tuner.recorded import Recorded
from headstart.tuner.simulate import names, rates, simulate

SCHEMA = "headstart.tune/1"
ORACLES = ("optimal",)
"""What nobody can run: a bound, and never advised."""
ONLY_SIMULATED = ("lfu", "sieve", *ORACLES)
LEAST_GAIN = 0.02
"""Of the tokens, for twice the capacity."""
_POINT = 0.01
_NUM_POINTS = 10
_FACTORS = (1, 2, 4, 8)
_BETTER = 0.005
"""A policy is advised instead of `lru` for so many more of the tokens."""

Advance = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A policy at a capacity."""

    policy: str
    capacity_tokens: int
    cold: Rates
    late: Rates
    """In the last half of the requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """`lru` with blocks of a size, at the capacity of the knee."""

    block_size: int
    infinite: Infinite
    late: Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to use, and why. No capacity: nothing is worth holding."""

    policy: str
    block_size: int
    capacity_tokens: int | None
    late: Rates
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tuned:
    """All that was found."""

    recorded: Recorded
    infinite: Infinite
    cold: Curve
    late: Curve
    points: tuple[Point, ...]
    sizes: tuple[Size, ...]
    advice: Advice
    token_nbytes: int | None = None
    """Bytes of KV a token, where they were told."""
    is_interrupted: bool = False
    """Some of the points that were asked for are not there."""


def tune(
    recorded: Recorded,
    *,
    policies: Sequence[str] = ("lru",),
    capacities_tokens: Sequence[int] = (),
    least_gain: float = LEAST_GAIN,
    token_nbytes: int | None = None,
    advance: Advance = lambda what, done, total: None,
) -> Tuned:
    """Find it. By default at some capacities up to the one that is enough. Raises ConfigError.

    After Ctrl-C it has the points that were done; with none it is raised.
    """
    for name in policies:
        if name.partition("=")[0] not in names():
            raise ConfigError(f"policy {name!r} is unknown; known: {', '.join(names())}")
    if not policies or min(capacities_tokens, default=1) < 1:
        raise ConfigError("a policy at least is tried, at capacities of at least one token")
    found = depth_steps(recorded)
    cold, late = (lru_curve(recorded, found, first) for first in (0, half(recorded)))
    knee = knee_blocks(late, least_gain)
    size = recorded.block_size
    capacities = list(capacities_tokens) or _capacities(cold.enough_blocks, knee, size)
    wanted = [(name, capacity) for name in policies for capacity in capacities]
    # Others than `lru` are compared with it at the knee, too.
    extra = [
        (name, knee * size)
        for name in policies
        if knee is not None and name not in ("lru", *ORACLES) and knee * size not in capacities
    ]
    points, is_interrupted = _points(recorded, [*wanted, *extra], (cold, late), advance)
    sizes = list(_sizes(recorded, knee, found))
    return Tuned(
        recorded=recorded,
        infinite=infinite(recorded),
        cold=cold,
        late=late,
        points=tuple(points[: len(wanted)]),
        sizes=tuple(sizes),
        advice=_advice(recorded, knee, late, points, sizes),
        token_nbytes=token_nbytes,
        is_interrupted=is_interrupted,
    )


def knee_blocks(curve: Curve, least_gain: float = LEAST_GAIN) -> int | None:
    """See the module. None: nothing gives so much."""
    hits = curve.tokens / max(1, curve.num_tokens)
    doubled = np.minimum(2 * np.arange(len(hits)), len(hits) - 1)
    gives = np.flatnonzero(hits[doubled] - hits >= least_gain)
    if len(gives):
        return (int(gives[-1]) + 1) * curve.step
    # From nothing to one block is no doubling.
    return curve.step if len(hits) > 1 and hits[1] >= least_gain else None


def _capacities(enough_blocks: int, knee: int | None, block_size: int) -> list[int]:
    """Halves of halves of what is enough, and the knee, in tokens."""
    parts = {-(-enough_blocks // 2**power) for power in range(_NUM_POINTS)}
    return [blocks * block_size for blocks in sorted({*parts, knee or 1} - {0})]


def _points(
    recorded: Recorded,
    wanted: Sequence[tuple[str, int]],
    curves: tuple[Curve, Curve],
    advance: Advance,
) -> tuple[list[Point], bool]:
    """Each policy at its capacity, in tokens; and whether Ctrl-C came before the last one."""
    points: list[Point] = []
    num_steps = len(wanted) * len(recorded)
    try:
        for number, (name, capacity) in enumerate(wanted):
            what, num_before = f"{name}, {capacity:,} tokens", number * len(recorded)
            told = partial(_tell, advance, what, num_before, num_steps)
            told(0)
            points.append(_point(recorded, name, capacity, curves, told))
    except KeyboardInterrupt:
        if not points:
            raise
        return points, True
    return points, False


def _tell(advance: Advance, what: str, num_before: int, num_steps: int, done: int) -> None:
    advance(what, num_before + done, num_steps)


def _point(
    recorded: Recorded,
    name: str,
    capacity_tokens: int,
    curves: tuple[Curve, Curve],
    told: Callable[[int], None],
) -> Point:
    blocks = capacity_tokens // recorded.block_size
    if name == "lru":
        both = curves[0].at(blocks), curves[1].at(blocks)
    else:
        hits = simulate(recorded, name, blocks, told)
        both = rates(recorded, hits), rates(recorded, hits, half(recorded))
    return Point(policy=name, capacity_tokens=capacity_tokens, cold=both[0], late=both[1])


def _sizes(recorded: Recorded, knee: int | None, found: Any) -> Iterable[Size]:
    for factor in _FACTORS:
        coarse = recorded if factor == 1 else recorded.coarser(factor)
        if not len(coarse.blocks):
            return
        curve = lru_curve(coarse, found if factor == 1 else depth_steps(coarse), half(coarse))
        yield Size(
            block_size=coarse.block_size,
            infinite=infinite(coarse),
            late=curve.at((knee or 0) // factor),
        )


def _advice(
    recorded: Recorded,
    knee: int | None,
    late: Curve,
    points: Sequence[Point],
    sizes: Sequence[Size],
) -> Advice:
    block_size = recorded.block_size
    if knee is None:
        return Advice(
            policy="lru",
            block_size=block_size,
            capacity_tokens=None,
            late=late.infinite,
            reasons=(f"all that can be hit are {late.infinite.token_hit:.1%} of the tokens",),
        )
    at = [late.at(max(0, blocks)).token_hit for blocks in (knee, 2 * knee, knee // 2)]
    reasons = [
        f"{knee * block_size:,} tokens hit {at[0]:.1%}; twice as many {at[1]:.1%}, half "
        f"{at[2]:.1%}, all {late.infinite.token_hit:.1%} (last half of the requests)"
    ]
    rivals = [
        point
        for point in points
        if point.capacity_tokens == knee * block_size and point.policy not in ONLY_SIMULATED
    ]
    policy, best = "lru", late.at(knee)
    for rival in rivals:
        if rival.late.token_hit >= best.token_hit + _BETTER:
            policy, best = rival.policy, rival.late
    shares = {"lru": at[0], **{each.policy: each.late.token_hit for each in rivals}}
    if len(shares) > 1:
        told = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        reasons.append(f"policies there: {told}")
    largest = max(
        (each.block_size for each in sizes if each.late.token_hit >= at[0] - _POINT),
        default=block_size,
    )
    told = ", ".join(f"{each.block_size:,}: {each.late.token_hit:.1%}" for each in sizes)
    if len(sizes) > 1:
        reasons.append(f"the largest blocks that cost less than a point ({told})")
    return Advice(
        policy=policy,
        block_size=largest,
        capacity_tokens=knee * block_size,
        late=best,
        reasons=tuple(reasons),
    )


def pareto(points: Iterable[Point]) -> list[Point]:
    """Those that no smaller or equal capacity beats, without oracles, by capacity."""
    found: list[Point] = []
    ranked = sorted(
        (point for point in points if point.policy not in ORACLES),
        key=lambda point: (point.capacity_tokens, -point.cold.token_hit),
    )
    for point in ranked:
        if not found or point.cold.token_hit > found[-1].cold.token_hit:
            found.append(point)
    return found


def document(tuned: Tuned) -> dict[str, Any]:
    """As JSON."""
    recorded, advice = tuned.recorded, tuned.advice
    return {
        "schema": SCHEMA,
        "trace": {
            "kind": str(recorded.kind),
            "requests": len(recorded),
            "input_tokens": int(recorded.input_tokens.sum()),
            "block_size": recorded.block_size,
            "times_told": recorded.has_times,
            "token_nbytes": tuned.token_nbytes,
        },
        "infinite_hit": infinite_document(tuned.infinite),
        "enough_tokens": tuned.cold.enough_blocks * recorded.block_size,
        "curve": [_told(point) for point in tuned.points],
        "recommended": {
            "policy": advice.policy,
            "block_size": advice.block_size,
            "capacity_tokens": advice.capacity_tokens,
            "block_hit_last_half": advice.late.block_hit,
            "token_hit_last_half": advice.late.token_hit,
            "reasons": list(advice.reasons),
        },
        "pareto": [_told(point) for point in pareto(tuned.points)],
        "block_sizes": [
            {
                "block_size": each.block_size,
                "infinite_hit": infinite_document(each.infinite),
                "token_hit_last_half": each.late.token_hit,
            }
            for each in tuned.sizes
        ],
    }


def _told(point: Point) -> dict[str, Any]:
    return {
        "policy": point.policy,
        "capacity_tokens": point.capacity_tokens,
        "block_hit": point.cold.block_hit,
        "token_hit": point.cold.token_hit,
        "block_hit_last_half": point.late.block_hit,
        "token_hit_last_half": point.late.token_hit,
    }
