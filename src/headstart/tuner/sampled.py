"""How far off what a sample of a trace's sessions tells may be.

The sample is divided into parts: whole sessions, by chance, so disjoint samples of a smaller share.
Each gives every figure once more (random groups: Wolter 2007):

    chance   the spread of the parts' figures over the root of their number, by Student's t; less
             where the sample is much of the trace
    bias     a sample is off by what its size divides, so the whole one by the mean of the parts'
             figures minus its own, over their number less one

The error is the sum of both. It is meant to hold in 19 of 20 samples, for each figure by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.errors import ConfigError
from headstart.tuner.curve import Rates, depth_steps, lru_curve
from headstart.tuner.facts import half
from headstart.tuner.recorded import Recorded
from headstart.tuner.simulate import rates, simulate

if TYPE_CHECKING:
    from headstart.tuner.tune import Advance, Point, Tuned

NUM_PARTS = 8
_STUDENT_T = 2.365
"""Of 95 % and 7 degrees of freedom: the parts less one."""
LEAST_SESSIONS = 5 * NUM_PARTS
_Both = tuple[Rates, Rates]
"""From a cold start, and in the last half of the requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """Shares of the tokens that are hits may be so much less or more."""

    cold: float
    late: float
    """In the last half of the requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Of what was tuned on a sample."""

    points: tuple[Error, ...]
    """Of each of its points."""
    infinite: Error
    num_sessions: int


def errors(tuned: Tuned, seed: int, advance: Advance = lambda what, done, total: None) -> Errors:
    """Find them. Raises ConfigError where a sample has too few sessions to tell."""
    recorded = tuned.recorded
    num_sessions = len(np.unique(recorded.session))
    if num_sessions < LEAST_SESSIONS:
        raise ConfigError(
            f"a sample of {num_sessions} sessions cannot tell how far off it is; take a larger "
            f"share, with {LEAST_SESSIONS} sessions at least, or the whole trace"
        )
    told = []
    for done, part in enumerate(recorded.parts(NUM_PARTS, seed)):
        advance("comparing parts of the sample", done, NUM_PARTS)
        told.append(_figures(part, tuned.points))
    own = [*((each.cold, each.late) for each in tuned.points)]
    own.append((tuned.cold.infinite, tuned.late.infinite))
    found = [
        _error(each, [part[number] for part in told], recorded.share)
        for number, each in enumerate(own)
    ]
    return Errors(points=tuple(found[:-1]), infinite=found[-1], num_sessions=num_sessions)


def _figures(recorded: Recorded, points: Sequence[Point]) -> list[_Both]:
    """Of each point, and without a limit."""
    depth, first = depth_steps(recorded), half(recorded)
    cold, late = (lru_curve(recorded, depth, start) for start in (0, first))
    found: list[_Both] = []
    for point in points:
        blocks = point.capacity_tokens // recorded.block_size
        if point.policy == "lru":
            found.append((cold.at(blocks), late.at(blocks)))
        else:
            hits = simulate(recorded, point.policy, blocks)
            found.append((rates(recorded, hits), rates(recorded, hits, first)))
    return [*found, (cold.infinite, late.infinite)]


def _error(own: _Both, parts: Sequence[_Both], share: float) -> Error:
    """Of a figure that the whole sample and its parts have told."""
    values = np.array([[each.token_hit for each in both] for both in parts])
    means, spreads = values.mean(axis=0), values.std(axis=0, ddof=1)
    chance = _STUDENT_T * spreads * math.sqrt((1.0 - share) / len(parts))
    bias = np.abs(means - [each.token_hit for each in own]) / (len(parts) - 1)
    cold, late = (chance + bias).tolist()
    return Error(cold=cold, late=late)


def sample_document(tuned: Tuned, found: Errors) -> dict[str, Any]:
    """As JSON: how large the sample is, and the errors, in the order of the curve."""
    return {
        "share": tuned.recorded.share,
        "sessions": found.num_sessions,
        "error": f"95 %, from {NUM_PARTS} disjoint parts of the sample",
        "curve": [_told(each) for each in found.points],
        "infinite_hit": _told(found.infinite),
    }


def _told(error: Error) -> dict[str, float]:
    return {"token_hit_error": error.cold, "token_hit_last_half_error": error.late}


def error_rows(tuned: Tuned, found: Errors) -> tuple[list[str], list[list[str]]]:
    """Titles, and a line for each point."""
    titles = ["policy", "capacity, tokens", "tokens hit", "tokens hit, last half"]
    rows = []
    for point, error in zip(tuned.points, found.points, strict=True):
        capacity = f"{point.capacity_tokens:,}"
        rows.append([point.policy, capacity, *_within((point.cold, point.late), error)])
    most = tuned.cold.infinite, tuned.late.infinite
    return titles, [*rows, ["any", "no limit", *_within(most, found.infinite)]]


def _within(both: _Both, error: Error) -> list[str]:
    return [
        f"{rate.token_hit:.2%} ± {100.0 * each:.2f}"
        for rate, each in zip(both, (error.cold, error.late), strict=True)
    ]
