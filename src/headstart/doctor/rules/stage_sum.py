"""Stages that add up to more than the whole: they are not of the same requests.

    queue + look-up + load + prefill > 2 * TTFT

Stages may overlap: loading layer by layer under computing hides at most the shorter of the two, so
the sum is at most twice the whole. What an engine counts in two stages is counted once, and stages
that are means may be `SKEW` times as long as a median (see `headstart.doctor.split`).
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.doctor.split import split_of, whole
from headstart.units import format_seconds

_OVERLAP = 2.0


def find(known: Known) -> Iterator[Sign]:
    """An arm whose measured stages take longer than all of it."""
    for arm in known.situations:
        split, ttft = split_of(known, arm), whole(arm)
        if split is None or ttft is None:
            continue
        total = sum(stage.seconds for stage in split.stages if stage.is_measured)
        most = _OVERLAP * ttft.slack * ttft.seconds
        if total > most:
            yield Sign(
                strength=Strength.COMPUTED,
                margin=ratio(total, most),
                evidence=(
                    say(
                        f"the stages take {{total}} together, the first token {{arm.{ttft.key}}}",
                        arm=arm,
                        total=format_seconds(total),
                    ),
                ),
            )


RULE = Rule(
    name="stage_sum",
    cause=Cause.MEASUREMENT,
    needs=(("arms.ttft_p50", "arms.queue", "arms.load", "arms.prefill"),),
    find=find,
    fixes=(
        Fix(text="take all stages of the same requests, and the same mean or percentile of each"),
    ),
)
