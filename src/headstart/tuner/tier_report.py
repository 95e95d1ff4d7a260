"""Several setups of two tiers replayed: hits, writes and reads, as a document and as rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headstart.blockfile import slot_nbytes
from headstart.tuner.curve import Rates
from headstart.tuner.endurance import Endurance, a_day
from headstart.tuner.facts import half
from headstart.tuner.recorded import Recorded
from headstart.tuner.simulate import rates
from headstart.tuner.tiers import TierResult, TierSetup, simulate_tiers
from headstart.tuner.tune import Advance
from headstart.units import format_nbytes

_MANY = 10.0
"""A share that is told as a number of times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPoint:
    """A setup and what came of it. Shares are of the prompt tokens."""

    setup: TierSetup
    block_size: int
    memory: Rates
    both: Rates
    """From memory or files."""
    late_memory: Rates
    late_both: Rates
    """In the last half of the requests."""
    read_blocks: int
    written_by_cause: dict[str, int]
    rewritten_blocks: int
    span_s: float
    """From the first request to the last."""
    block_nbytes: int | None
    """On the SSD, with its header; None: the KV of a token is not told."""
    endurance: Endurance | None

    @property
    def written_blocks(self) -> int:
        """To the file tier."""
        return sum(self.written_by_cause.values())

    @property
    def written_nbytes_a_day(self) -> float | None:
        """To the file tier."""
        return self._a_day(self.written_blocks)

    @property
    def read_nbytes_a_day(self) -> float | None:
        """From the file tier."""
        return self._a_day(self.read_blocks)

    @property
    def budget_nbytes_a_day(self) -> float | None:
        """What the SSD may be written."""
        if self.endurance is None or self.block_nbytes is None:
            return None
        return self.endurance.budget_nbytes_a_day(self.setup.file_blocks * self.block_nbytes)

    @property
    def endurance_used(self) -> float | None:
        """Share of the budget that is written; None also where there is none."""
        written, budget = self.written_nbytes_a_day, self.budget_nbytes_a_day
        return None if written is None or not budget else written / budget

    def _a_day(self, num_blocks: int) -> float | None:
        if self.block_nbytes is None:
            return None
        return a_day(num_blocks * self.block_nbytes, self.span_s)


def tier_points(
    recorded: Recorded,
    setups: Sequence[TierSetup],
    *,
    token_nbytes: int | None = None,
    endurance: Endurance | None = None,
    advance: Advance = lambda what, done, total: None,
) -> tuple[list[TierPoint], bool]:
    """Replay each setup; and whether Ctrl-C came before the last one."""
    block_nbytes = None
    if token_nbytes is not None:
        block_nbytes = slot_nbytes(token_nbytes * recorded.block_size)
    num_steps = len(setups) * len(recorded)
    points: list[TierPoint] = []
    try:
        for number, setup in enumerate(setups):
            num_before = number * len(recorded)
            told = partial(_tell, advance, f"tiers, {setup.write}", num_before, num_steps)
            told(0)
            result = simulate_tiers(recorded, setup, told)
            points.append(_point(recorded, result, block_nbytes, endurance))
    except KeyboardInterrupt:
        return points, True
    return points, False


def _tell(advance: Advance, what: str, num_before: int, num_steps: int, done: int) -> None:
    advance(what, num_before + done, num_steps)


def _point(
    recorded: Recorded, result: TierResult, block_nbytes: int | None, endurance: Endurance | None
) -> TierPoint:
    late = half(recorded)
    return TierPoint(
        setup=result.setup,
        block_size=recorded.block_size,
        memory=rates(recorded, result.memory_hits),
        both=rates(recorded, result.hits),
        late_memory=rates(recorded, result.memory_hits, late),
        late_both=rates(recorded, result.hits, late),
        read_blocks=result.read_blocks,
        written_by_cause=result.written_by_cause,
        rewritten_blocks=result.rewritten_blocks,
        span_s=float(recorded.at_s[-1] - recorded.at_s[0]),
        block_nbytes=block_nbytes,
        endurance=endurance,
    )


def point_document(point: TierPoint) -> dict[str, Any]:
    """As JSON. Bytes are null where the KV of a token is not told."""
    setup, nbytes = point.setup, point.block_nbytes
    return {
        "memory_tokens": setup.memory_blocks * point.block_size,
        "file_tokens": setup.file_blocks * point.block_size,
        "policy": setup.policy,
        "write": setup.write,
        "inclusive": setup.inclusive,
        "ttl_s": setup.ttl_s,
        "engines": setup.engines,
        "token_hit": point.both.token_hit,
        "token_hit_memory": point.memory.token_hit,
        "token_hit_last_half": point.late_both.token_hit,
        "token_hit_memory_last_half": point.late_memory.token_hit,
        "block_hit": point.both.block_hit,
        "block_hit_memory": point.memory.block_hit,
        "read_blocks": point.read_blocks,
        "written_blocks": point.written_blocks,
        "written_blocks_by_cause": point.written_by_cause,
        "rewritten_blocks": point.rewritten_blocks,
        "span_s": point.span_s,
        "block_nbytes": nbytes,
        "read_nbytes": None if nbytes is None else point.read_blocks * nbytes,
        "read_nbytes_a_day": point.read_nbytes_a_day,
        "written_nbytes": None if nbytes is None else point.written_blocks * nbytes,
        "written_nbytes_a_day": point.written_nbytes_a_day,
        "endurance": None if point.endurance is None else point.endurance.text,
        "endurance_nbytes_a_day": point.budget_nbytes_a_day,
        "endurance_used": point.endurance_used,
    }


def tier_rows(points: Sequence[TierPoint]) -> tuple[list[str], list[list[str]]]:
    """Titles, and a line for each setup; bytes and a day only where a token's are known."""
    has_bytes = points[0].block_nbytes is not None
    rating = points[0].endurance
    titles = ["write", "memory, tokens", "files, tokens", "memory hits", "files hit", "last half"]
    titles += ["written", *["a day"] * has_bytes, "why", "read"]
    if rating is not None:
        titles.insert(-2, f"of {rating.text}")
    return titles, [_row(point, has_bytes, rating is not None) for point in points]


def _row(point: TierPoint, has_bytes: bool, has_rating: bool) -> list[str]:
    setup = point.setup
    return [
        setup.write,
        f"{setup.memory_blocks * point.block_size:,}",
        f"{setup.file_blocks * point.block_size:,}",
        f"{point.memory.token_hit:.2%}",
        f"{point.both.token_hit - point.memory.token_hit:.2%}",
        f"{point.late_both.token_hit:.2%}",
        _amount(point, point.written_blocks),
        *[_told(point.written_nbytes_a_day)] * has_bytes,
        *[_used(point.endurance_used)] * has_rating,
        _why(point),
        _amount(point, point.read_blocks),
    ]


def _amount(point: TierPoint, num_blocks: int) -> str:
    if point.block_nbytes is None:
        return f"{num_blocks * point.block_size:,} tokens"
    return format_nbytes(num_blocks * point.block_nbytes)


def _told(nbytes_a_day: float | None) -> str:
    return "unknown" if nbytes_a_day is None else format_nbytes(round(nbytes_a_day))


def _used(share: float | None) -> str:
    if share is None:
        return "unknown"
    return f"{share:.0%}" if share < _MANY else f"{share:,.0f} times"


def _why(point: TierPoint) -> str:
    """Shares of the causes, and of what had been written before."""
    written = point.written_blocks
    if not written:
        return "nothing written"
    shares = ", ".join(
        f"{cause} {count / written:.0%}" for cause, count in point.written_by_cause.items() if count
    )
    return f"{shares}; {point.rewritten_blocks / written:.0%} again"
