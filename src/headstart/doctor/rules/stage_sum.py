"""Stages that add up to more than the whole: they are not of the same requests.

    queue + look-up + load + prefill > 2 * TTFT

Stages may overlap: loading layer by layer under computing hides at most the shorter of the two, so
the sum is at most twice the whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.doctor.split import split_of
from headstart.units import format_seconds

_OVERLAP = 2.0


def find(known: Known) -> Iterator[Sign]:
    """An arm whose measured stages take longer than all of it."""
    for arm in known.situations:
        split = split_of(known, arm)
        if split is None:
            continue
        total = sum(stage.seconds for stage in split.stages if stage.is_measured)
        if total > _OVERLAP * split.ttft_s:
            yield Sign(
                strength=Strength.COMPUTED,
                margin=ratio(total, _OVERLAP * split.ttft_s),
                evidence=(
                    say(
                        "the stages take {total} together, the first token {arm.ttft}",
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
    fixes=(Fix(text="take all stages of the same requests, and the same percentile of each"),),
)
