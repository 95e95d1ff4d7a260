"""A tier that is said to hit, while next to nothing is loaded from it.

    tokens to load / tokens hit ~ 0

The engine's own device cache had them; what was measured is what asking costs. Below 5 %: the last
block is always computed or loaded anew, which is more than that only for prompts of under 20
blocks. Where the run to compare with says that its device hits as much, it is no surprise: what the
two differ by is what the tier costs.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import MATERIAL, all_local, hit_share, hit_tokens, hitting, pairs, ratio
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_NONE = 0.05


def find(known: Known) -> Iterator[Sign]:
    """An arm with hits, and nothing to load."""
    for arm in hitting(known):
        loaded, hit = arm.number("load_tokens"), hit_tokens(arm) or arm.number("found_tokens")
        if loaded is None or not hit or loaded > _NONE * hit or _is_meant(known, arm):
            continue
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(_NONE * hit, loaded),
            evidence=(
                say(
                    "{hit:,.0f} tokens hit a request, {arm.load_tokens} of them to load: the "
                    "device cache had the rest, so this says nothing about the tier",
                    arm=arm,
                    hit=hit,
                ),
            ),
        )


def _is_meant(known: Known, arm: Group) -> bool:
    """Whether a run without the tier hits as much, as it says itself."""
    for pair in pairs(known):
        before = hit_share(pair.without) if "hit_rate" in pair.without.own else None
        if pair.hit is arm and before and all_local(arm):
            return before >= (1.0 - MATERIAL) * (hit_share(arm) or 1.0)
    return False


RULE = Rule(
    name="tier_unused",
    cause=Cause.MEASUREMENT,
    needs=(("arms.load_tokens", "arms.cached_tokens"), ("arms.load_tokens", "arms.found_tokens")),
    find=find,
    fixes=(
        Fix(engine="vllm", text="--no-enable-prefix-caching in the run that is to test the tier"),
        Fix(engine="sglang", text="POST /flush_cache before the run that is to test storage"),
        Fix(text="ask more distinct prompts than the device cache holds, or restart the engine"),
    ),
)
