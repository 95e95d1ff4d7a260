"""A semantic cache that costs every request more than its hits save.

    worth it only if  h > t_lookup / t_miss      t_lookup = embedding + search

Every request pays the look-up; a share h of them saves t_miss. The difference is t_lookup - h *
t_miss for the mean request.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.doctor.quantities import show_share
from headstart.units import format_seconds


def find(known: Known) -> Iterator[Sign]:
    """Arms whose semantic cache does not pay."""
    for arm in known.situations:
        hits, miss = arm.number("semantic_hit_rate"), _miss_s(known, arm)
        cost = (arm.number("embed") or 0.0) + (arm.number("ann") or 0.0)
        if hits is None or not cost or not miss or hits >= cost / miss:
            continue
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(cost / miss, hits),
            explained_s=cost - hits * miss,
            evidence=(
                say(
                    "a look-up takes {cost}, a miss {miss}: it pays from a hit rate of {least}, "
                    "and has {arm.semantic_hit_rate}",
                    arm=arm,
                    cost=format_seconds(cost),
                    miss=format_seconds(miss),
                    least=show_share(cost / miss),
                ),
            ),
        )


def _miss_s(known: Known, arm: Group) -> float | None:
    told = arm.number("semantic_miss")
    if told is not None:
        return told
    off = [other.number("ttft") for other in known.arms if other.text("cache") == "off"]
    return next((each for each in off if each), None)


RULE = Rule(
    name="semantic_worth",
    cause=Cause.SEMANTIC_CACHE,
    needs=(("arms.semantic_hit_rate", "arms.embed", "arms.ann", "arms.semantic_miss"),),
    find=find,
    fixes=(
        Fix(text="an exact cache (hash of the normalised question) before the semantic one"),
        Fix(text="a smaller embedder, on the CPU, one thread, loaded once"),
        Fix(text="only for kinds of requests that come again; measure the hit rate live"),
        Fix(text="turn it off below that hit rate"),
    ),
)
