"""A tier that is asked for what the device holds already: it adds cost, and no tokens.

hit rate of the device >= 80 % of the whole, and TTFT with the tier / without > 1 + noise
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import all_local, pairs
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength


def find(known: Known) -> Iterator[Sign]:
    """Pairs that lose while the device hits all there is."""
    for pair in pairs(known):
        if all_local(pair.hit) and pair.ratio > 1.0 + pair.noise:
            yield Sign(
                strength=Strength.COMPUTED,
                margin=pair.ratio / (1.0 + pair.noise),
                explained_s=-pair.gain_s,
                evidence=(
                    say(
                        "the device hits {hit.local_hit_rate} by itself; with the tier the first "
                        f"token takes {{hit.{pair.key}}} instead of {{without.{pair.key}}}",
                        hit=pair.hit,
                        without=pair.without,
                    ),
                ),
            )


RULE = Rule(
    name="adds_nothing",
    cause=Cause.SLOW_TIER,
    needs=(("arms.local_hit_rate", "arms.hit_rate", "arms.ttft_p50", "arms.cache"),),
    find=find,
    fixes=(
        Fix(text="ask the tier only beyond what the device hits, and not before it is scheduled"),
        Fix(text="take the connector away until the working set is larger than the device cache"),
    ),
)
