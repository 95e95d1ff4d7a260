"""What speaks for nothing being wrong. Pure.

A hit is as it should be where it is sooner than computing by at least a quarter of what its tokens
take to compute: loading, looking up and the rest of the prompt may take the other three. Nothing
hit is as it should be where nothing could be, a tier without hits where the device has them all.
A semantic cache is as it should be where its hits save more than all its look-ups cost.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import (
    MATERIAL,
    TOLERANCE,
    Pair,
    all_local,
    break_even,
    hit_share,
    hits_well,
    pairs,
    prefill_rate,
    subject,
)
from headstart.doctor.facts import Evidence, Group, Known, say
from headstart.doctor.quantities import show_bytes_per_s, show_share
from headstart.doctor.split import split_of, whole
from headstart.units import format_seconds

_LEAST_GAIN = 0.25
_NOTHING_SHARED = 0.05
_MOST = 0.5


def signs_of_health(known: Known) -> Iterator[Evidence]:
    """A sentence each. None: nothing is known to be right."""
    found = list(pairs(known))
    good = []
    for pair in found:
        wanted = _LEAST_GAIN * (hit_share(pair.hit) or 0.0)
        gain = 1.0 - pair.ratio
        if gain > max(pair.noise, wanted):
            good.append(
                say(
                    f"with hits the first token comes after {{hit.{pair.key}}} instead of "
                    f"{{without.{pair.key}}}: {{gain}} sooner",
                    hit=pair.hit,
                    without=pair.without,
                    gain=show_share(gain),
                )
            )
        elif _nothing_to_hit(pair.hit) and abs(gain) <= pair.noise:
            good.append(
                say(
                    f"nothing could be hit, and the cache costs nothing: {{hit.{pair.key}}} "
                    f"against {{without.{pair.key}}}",
                    hit=pair.hit,
                    without=pair.without,
                )
            )
        elif _tier_not_needed(pair):
            good.append(
                say(
                    "the device hits {hit.local_hit_rate} by itself, and the tier beside it costs "
                    f"nothing: {{hit.{pair.key}}} against {{without.{pair.key}}}",
                    hit=pair.hit,
                    without=pair.without,
                )
            )
        else:
            return  # a pair that does not gain is a question, whatever else is fine
    yield from good
    arm = subject(known)
    if not found and arm is not None:
        yield from _spent_well(known, arm)
    if arm is None:
        yield from _fast_enough(known)
        yield from _semantic_pays(known)


def _tier_not_needed(pair: Pair) -> bool:
    """Both arms hit what can be hit, in the device, and take the same."""
    before, after = hit_share(pair.without), hit_share(pair.hit)
    return (
        before is not None
        and after is not None
        and before >= (1.0 - MATERIAL) * after
        and hits_well(pair.hit)
        and all_local(pair.hit)
        and abs(1.0 - pair.ratio) <= pair.noise
    )


def _semantic_pays(known: Known) -> Iterator[Evidence]:
    """Its look-ups cost well less than its hits save, and its answers are as good as wanted."""
    top = known.top
    told = top.numbers("semantic_hit_rate", "semantic_miss")
    cost = (top.number("embed") or 0.0) + (top.number("ann") or 0.0)
    if told is None or not cost or told[0] * told[1] <= TOLERANCE * cost:
        return
    precision, target = top.number("semantic_precision"), top.number("semantic_target")
    if precision is not None and target is not None and precision < target:
        return
    yield say(
        "a look-up in the semantic cache takes {cost}, and saves {saved}: {top.semantic_hit_rate} "
        "of {top.semantic_miss}",
        top=top,
        cost=format_seconds(cost),
        saved=format_seconds(told[0] * told[1]),
    )


def _fast_enough(known: Known) -> Iterator[Evidence]:
    """Tiers well above the break-even bandwidth, where no time was told."""
    even = break_even(known)
    for tier in known.tiers:
        bandwidth = tier.number("bandwidth")
        if even is not None and bandwidth is not None and bandwidth > TOLERANCE * even:
            yield say(
                "{tier.name} gives {tier.bandwidth}; loading pays from {even}",
                tier=tier,
                even=show_bytes_per_s(even),
            )


def _nothing_to_hit(arm: Group) -> bool:
    shareable, shared = arm.number("shareable_share"), arm.number("shared_tokens")
    prompt = arm.number("prompt")
    if shareable is None and shared is not None and prompt:
        shareable = shared / prompt
    return shareable is not None and shareable <= _NOTHING_SHARED


def _spent_well(known: Known, arm: Group) -> Iterator[Evidence]:
    """It is far sooner than computing would be, or computing what was not held is most of it."""
    prompt, rate, ttft = arm.number("prompt"), prefill_rate(known), whole(arm)
    if ttft is None:
        return
    computing = prompt / rate if prompt and rate else 0.0
    if computing and hit_share(arm) and 1.0 - ttft.seconds / computing > _LEAST_GAIN:
        yield say(
            f"the first token comes after {{arm.{ttft.key}}}; computing {{arm.prompt}} takes "
            "{computing}",
            arm=arm,
            computing=format_seconds(computing),
        )
        return
    split = split_of(known, arm)
    if split is None:
        return
    stages = {stage.name: stage for stage in split.stages}
    prefill, rest = stages.get("prefill"), stages["rest"].seconds
    others = [name for name in stages if name not in ("prefill", "rest")]
    if (
        prefill is not None
        and prefill.is_measured
        and others
        and prefill.seconds > _MOST * split.ttft_s
        and abs(rest) < max(MATERIAL, 1 - _MOST) * split.ttft_s
        and (hit_share(arm) or 0.0) < 1 - MATERIAL
    ):
        yield say(
            f"most of {{arm.{ttft.key}}} is computing what was not held: {{arm.prefill}}", arm=arm
        )
