"""What the cache costs where nothing hits.

    throughput without / with > 1 + noise,  or  TTFT with / without > 1 + noise,  at hits ~ 0

Hashing, look-up and allocation are all that is left to blame.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import alike, common, hit_share, hitting, noise
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_NOTHING = 0.05


def find(known: Known) -> Iterator[Sign]:
    """Arms that hit nothing and are slower than without the cache."""
    for hit in hitting(known):
        rate = hit_share(hit)
        if rate is None or rate > _NOTHING:
            continue
        for without in known.arms:
            if without.text("cache") == "off" and alike(without, hit):
                yield from _slower(without, hit)


def _slower(without: Group, hit: Group) -> Iterator[Sign]:
    ttft = common(without, hit)
    told = [(ttft, False)] if ttft else []
    for key, inverse in (*told, ("request_throughput", True), ("throughput", True)):
        before, after = without.number(key), hit.number(key)
        if not before or not after:
            continue
        worse = before / after if inverse else after / before
        bound = 1.0 + noise(without, hit)
        if worse > bound:
            yield Sign(
                strength=Strength.COMPARED,
                margin=worse / bound,
                share=1.0 - 1.0 / worse,
                evidence=(
                    say(
                        f"nothing is hit, and {{without.{key}}} become {{hit.{key}}}",
                        without=without,
                        hit=hit,
                    ),
                ),
            )
            return


RULE = Rule(
    name="cost_without_hits",
    cause=Cause.LOOKUP_CPU,
    needs=(
        ("arms.cache", "arms.hit_rate", "arms.throughput"),
        ("arms.cache", "arms.hit_rate", "arms.ttft_p50"),
    ),
    find=find,
    fixes=(
        Fix(text="turn the cache off for a load without shared prefixes"),
        Fix(engine="vllm", text="--no-enable-prefix-caching"),
        Fix(engine="sglang", text="--disable-radix-cache"),
    ),
)
