"""What speaks for nothing being wrong. Pure.

A hit is as it should be where it is sooner than computing by at least a quarter of what its tokens
take to compute: loading, looking up and the rest of the prompt may take the other three. Nothing
hit is as it should be where nothing could be.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import (
    MATERIAL,
    TOLERANCE,
    break_even,
    hit_share,
    pairs,
    prefill_rate,
    subject,
)
from headstart.doctor.facts import Evidence, Group, Known, say
from headstart.doctor.quantities import show_bytes_per_s, show_share
from headstart.doctor.split import split_of
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
                    "with hits the first token comes after {hit.ttft} instead of {without.ttft}: "
                    "{gain} sooner",
                    hit=pair.hit,
                    without=pair.without,
                    gain=show_share(gain),
                )
            )
        elif _nothing_to_hit(pair.hit) and abs(gain) <= pair.noise:
            good.append(
                say(
                    "nothing could be hit, and the cache costs nothing: {hit.ttft} against "
                    "{without.ttft}",
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


def _gain(arm: Group, computing: float) -> float:
    """Share of the time to compute that a hit saved."""
    return 1.0 - (arm.number("ttft") or 0.0) / computing


def _nothing_to_hit(arm: Group) -> bool:
    shareable, shared = arm.number("shareable_share"), arm.number("shared_tokens")
    prompt = arm.number("prompt")
    if shareable is None and shared is not None and prompt:
        shareable = shared / prompt
    return shareable is not None and shareable <= _NOTHING_SHARED


def _spent_well(known: Known, arm: Group) -> Iterator[Evidence]:
    """It is far sooner than computing would be, or computing what was not held is most of it."""
    prompt, rate = arm.number("prompt"), prefill_rate(known)
    computing = prompt / rate if prompt and rate else 0.0
    if computing and hit_share(arm) and _gain(arm, computing) > _LEAST_GAIN:
        yield say(
            "the first token comes after {arm.ttft}; computing {arm.prompt} takes {computing}",
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
        yield say("most of {arm.ttft} is computing what was not held: {arm.prefill}", arm=arm)
