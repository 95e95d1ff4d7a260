"""A counter that stays at zero while the cache works.

    TTFT (nothing held) / TTFT (asked again) > 2, and hits = 0

Nothing but reuse halves the time of the same prompt; a warm-up does so once, so a first request
after a start is no evidence.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import pairs, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_FASTER = 2.0


def find(known: Known) -> Iterator[Sign]:
    """A pair that gains, with no hit counted."""
    for pair in pairs(known):
        hits, queries = pair.hit.number("num_hits"), pair.hit.number("num_queries")
        none = hits == 0.0 and queries != 0.0
        none = none or (hits is None and pair.hit.number("hit_rate") == 0.0)
        if none and pair.ratio and 1.0 / pair.ratio > _FASTER:
            key = "num_hits" if hits == 0.0 else "hit_rate"
            yield Sign(
                strength=Strength.COMPUTED,
                margin=ratio(1.0 / pair.ratio, _FASTER),
                evidence=(
                    say(
                        f"asked again, the first token comes after {{hit.{pair.key}}} instead of "
                        f"{{without.{pair.key}}}, and the counter says {{hit.{key}}} hits",
                        hit=pair.hit,
                        without=pair.without,
                    ),
                ),
            )


RULE = Rule(
    name="dead_counter",
    cause=Cause.MEASUREMENT,
    needs=(("arms.ttft_p50", "arms.cache", "arms.num_hits"),),
    find=find,
    fixes=(
        Fix(text="do not read this counter in this version; judge by time, or by cached tokens"),
    ),
)
