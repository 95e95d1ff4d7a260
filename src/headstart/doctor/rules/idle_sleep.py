"""Loops that sleep when there is nothing to do, and are asleep when there is.

    share of the wall time spent in such sleeps > 10 %

A request waits for half a sleep at every hand-over, at each stage.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import MATERIAL, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength


def find(known: Known) -> Iterator[Sign]:
    """Arms whose idle loops sleep."""
    for arm in known.situations:
        share, ttft = arm.number("sleep_share"), arm.number("ttft")
        if share is None or share <= MATERIAL:
            continue
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(share, MATERIAL),
            explained_s=share * ttft if ttft else None,
            share=share,
            evidence=(say("idle loops sleep {arm.sleep_share} of the wall time", arm=arm),),
        )


RULE = Rule(
    name="idle_sleep",
    cause=Cause.LOCK_CONTENTION,
    needs=(("arms.sleep_share",),),
    find=find,
    fixes=(
        Fix(text="wait on a condition or a queue instead of sleeping; if it must poll, sleep(0)"),
    ),
)
