"""A look-up, or an allocation, that takes longer the more is held: a list that is searched.

    time (large pool) / time (small pool) > (large / small) ^ 0.5

A hash table costs the same, a tree a little more; half-way to linear is neither.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, alike, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_POWER = 0.5


def find(known: Known) -> Iterator[Sign]:
    """A sweep of pool sizes with look-up or eviction times."""
    for key in ("lookup", "evict"):
        sweep = [arm for arm in known.arms if arm.numbers("pool_tokens", key)]
        if len(sweep) < 2:
            continue
        sweep.sort(key=lambda arm: arm.number("pool_tokens") or 0.0)
        small, large = sweep[0], sweep[-1]
        larger = ratio(large.number("pool_tokens") or 0.0, small.number("pool_tokens") or 0.0)
        longer = ratio(large.number(key) or 0.0, small.number(key) or 0.0)
        bound = max(TOLERANCE, larger**_POWER)
        if larger > TOLERANCE and longer > bound and alike(small, large, but="pool_tokens"):
            yield Sign(
                strength=Strength.COMPUTED,
                margin=longer / bound,
                explained_s=(large.number(key) or 0.0) if key == "lookup" else None,
                evidence=(
                    say(
                        f"{key}: {{small.{key}}} with {{small.pool_tokens}}, {{large.{key}}} with "
                        "{large.pool_tokens}",
                        small=small,
                        large=large,
                    ),
                ),
            )


RULE = Rule(
    name="lookup_scan",
    cause=Cause.LOOKUP_CPU,
    needs=(("arms.pool_tokens", "arms.lookup"), ("arms.pool_tokens", "arms.evict")),
    find=find,
    fixes=(
        Fix(text="a hash table or a radix tree, and an ordered list of what goes next"),
        Fix(text="a smaller pool until then: what it costs grows with it"),
    ),
)
