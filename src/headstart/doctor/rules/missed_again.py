"""Tokens that were held, evicted, and asked again: share of the misses > 20 %."""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import hit_share, hitting, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_SHARE = 0.2


def find(known: Known) -> Iterator[Sign]:
    """Arms that miss what they had."""
    for arm in hitting(known):
        again = arm.number("missed_after_eviction")
        if again is None or again <= _SHARE:
            continue
        yield Sign(
            strength=Strength.SEEN,
            margin=ratio(again, _SHARE),
            share=again * (1.0 - (hit_share(arm) or 0.0)),
            evidence=(
                say("{arm.missed_after_eviction} of what was missed had been evicted", arm=arm),
            ),
        )


RULE = Rule(
    name="missed_again",
    cause=Cause.EVICTION_THRASH,
    needs=(("arms.missed_after_eviction", "arms.hit_rate"),),
    find=find,
    fixes=(
        Fix(text="evict leaves before the prefixes that they share"),
        Fix(text="a larger pool, or a tier below it that what is evicted goes to"),
    ),
)
