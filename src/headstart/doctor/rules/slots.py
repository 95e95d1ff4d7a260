"""Prefixes that push each other out of the slots they are kept in: prefixes in turn > slots."""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import hit_share, hitting, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength


def find(known: Known) -> Iterator[Sign]:
    """Arms with more prefixes than slots."""
    for arm in hitting(known):
        told = arm.numbers("distinct_prefixes", "num_slots")
        if told is None or told[0] <= told[1] or (hit_share(arm) or 0.0) > 0.5:
            continue
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(*told),
            share=1.0,
            evidence=(
                say("{arm.distinct_prefixes} prefixes in turn, {arm.num_slots} slots", arm=arm),
            ),
        )


RULE = Rule(
    name="slots",
    cause=Cause.EVICTION_THRASH,
    needs=(("arms.distinct_prefixes", "arms.num_slots"),),
    find=find,
    fixes=(
        Fix(
            engine="llama.cpp", text="more slots (--parallel), and --cache-ram for those not in one"
        ),
        Fix(text="one slot for each prefix that comes in turn"),
    ),
)
