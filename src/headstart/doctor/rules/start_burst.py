"""All requests at once at the start of a short window: the burst is what was measured.

    TTFT p50 > duration / 2

In a closed loop of c clients, at least half of the requests then belong to the first c.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_HALF = 0.5


def find(known: Known) -> Iterator[Sign]:
    """An arm that is mostly its own start."""
    for arm in known.situations:
        told = arm.numbers("ttft", "duration")
        if told is None or not told[1] or (arm.number("concurrency") or 2.0) < 2.0:
            continue
        if told[0] > _HALF * told[1]:
            yield Sign(
                strength=Strength.COMPUTED,
                margin=ratio(told[0], _HALF * told[1]),
                evidence=(
                    say(
                        "first tokens come after {arm.ttft} in a window of {arm.duration}: half of "
                        "the requests came with the first burst",
                        arm=arm,
                    ),
                ),
            )


RULE = Rule(
    name="start_burst",
    cause=Cause.MEASUREMENT,
    needs=(("arms.ttft_p50", "arms.duration", "arms.concurrency"),),
    find=find,
    fixes=(
        Fix(text="measure for ten times the longest first token, and drop the ramp"),
        Fix(text="send at a rate (an open loop) below what the server sustains"),
    ),
)
