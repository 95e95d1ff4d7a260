"""More hits than the load allows: hit rate > share of tokens that an endless cache would hit.

Beyond `TOLERANCE`: both figures are averages.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, hit_share, hitting, is_low, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.doctor.quantities import show_share


def find(known: Known) -> Iterator[Sign]:
    """An arm that hit more than could be."""
    for arm in hitting(known):
        hit, possible = hit_share(arm), arm.number("shareable_share")
        if hit is None or possible is None or hit <= TOLERANCE * possible or is_low(hit):
            continue
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(hit, TOLERANCE * possible),
            evidence=(
                say(
                    "a hit rate of {hit} where at most {arm.shareable_share} of the tokens can be "
                    "hit: something else was asked, or an earlier run left its prompts behind",
                    arm=arm,
                    hit=show_share(hit),
                ),
            ),
        )


RULE = Rule(
    name="hits_above_possible",
    cause=Cause.MEASUREMENT,
    needs=(("arms.hit_rate", "arms.shareable_share"),),
    find=find,
    fixes=(Fix(text="empty every tier between runs, or give each run another salt"),),
)
