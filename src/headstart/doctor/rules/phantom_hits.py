"""Hits on what cannot be held any more.

    tokens asked between two uses of a prefix > pool, and yet it hits (LRU, no lower tier)
    tokens hit of one prompt > pool

Whatever these blocks hold, it is not this prompt. Beyond `TOLERANCE`.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, hit_share, hit_tokens, hitting, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_HITS = 0.5


def find(known: Known) -> Iterator[Sign]:
    """Arms with hits, a pool, and no tier below it."""
    if known.tiers or known.connector:
        return
    for arm in hitting(known):
        pool, hit = arm.number("pool_tokens"), hit_tokens(arm)
        share = hit_share(arm)
        if not pool or not hit:
            continue
        between = arm.number("reuse_distance") or 0.0
        kept = between <= TOLERANCE * pool or share is None or share < _HITS
        if kept and hit <= TOLERANCE * pool:
            continue
        key = "hit" if kept else "reuse_distance"
        asked = f"{hit:,.0f} tokens" if kept else "{arm.reuse_distance} asked in between"
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(hit if key == "hit" else between, TOLERANCE * pool),
            evidence=(
                say(
                    "{hit:,.0f} tokens are said to be hit, but the pool holds {arm.pool_tokens}: "
                    + asked,
                    arm=arm,
                    hit=hit,
                ),
            ),
        )


RULE = Rule(
    name="phantom_hits",
    cause=Cause.CORRECTNESS,
    needs=(
        ("arms.cached_tokens", "arms.prompt_tokens", "arms.pool_tokens", "arms.reuse_distance"),
    ),
    find=find,
    fixes=(
        Fix(text="check answers of hits against misses before anything else"),
        Fix(text="turn prefix caching off until the engine is updated, and report it"),
    ),
)
