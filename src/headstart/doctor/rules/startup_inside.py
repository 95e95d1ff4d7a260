"""Loading the model is no part of a first token. It is when somebody times a fresh process."""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength


def find(known: Known) -> Iterator[Sign]:
    """An arm that was timed with the start inside."""
    for arm in known.situations:
        if arm.says("includes_startup", True):
            yield Sign(
                strength=Strength.SEEN,
                margin=TOLERANCE,
                evidence=(
                    say(
                        "the times include the start of the engine: {arm.includes_startup}",
                        arm=arm,
                    ),
                ),
            )
            return


RULE = Rule(
    name="startup_inside",
    cause=Cause.MEASUREMENT,
    needs=(("arms.includes_startup",),),
    find=find,
    fixes=(
        Fix(text="start the clock when the engine answers its health check"),
        Fix(text="send a request of another prompt first, then drop it from the results"),
    ),
)
