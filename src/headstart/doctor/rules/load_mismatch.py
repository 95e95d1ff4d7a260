"""Not the load that was meant, or not the same load in both arms.

    input tokens/s / requests/s = prompt length
    prompt length of one arm / the other's
    prompt length at the end / at the start

Beyond a factor of 2 (`TOLERANCE` and then some): prompts that grow make later first tokens later
whatever is hit.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import alike, hitting, pairs, ratio
from headstart.doctor.facts import Evidence, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_OFF = 2.0


def find(known: Known) -> Iterator[Sign]:
    """Prompts that are not what they are said to be."""
    for arm in known.situations:
        told = arm.numbers("input_tokens_per_s", "request_throughput", "prompt")
        if told is not None and told[1]:
            length = told[0] / told[1]
            off = max(ratio(length, told[2]), ratio(told[2], length))
            if off > _OFF:
                yield _sign(
                    off,
                    say(
                        "{arm.input_tokens_per_s} by {arm.request_throughput} are prompts of "
                        "{length:,.0f} tokens, not of {arm.prompt}",
                        arm=arm,
                        length=length,
                    ),
                )
        grown = arm.numbers("prompt_tokens_end", "prompt_tokens_start")
        if grown is not None and ratio(*grown) > _OFF:
            yield _sign(
                ratio(*grown),
                say(
                    "prompts grow from {arm.prompt_tokens_start} to {arm.prompt_tokens_end}: later "
                    "ones take longer, whatever is hit",
                    arm=arm,
                ),
            )
    yield from _other_load(known)


def _other_load(known: Known) -> Iterator[Sign]:
    compared = {id(pair.hit) for pair in pairs(known)}
    others = [arm for arm in known.arms if arm.text("cache") in ("off", "cold")]
    for hit in hitting(known):
        if id(hit) in compared or not hit.number("ttft"):
            continue
        for without in others:
            lengths = hit.number("prompt"), without.number("prompt")
            if None in lengths or not alike(hit, without, but="prompt_tokens"):
                continue
            longer, shorter = sorted(each or 0.0 for each in lengths)[::-1]
            if ratio(longer, shorter) > _OFF:
                yield _sign(
                    ratio(longer, shorter),
                    say(
                        "prompts of {hit.prompt} in one arm and {without.prompt} in the other: "
                        "they do not compare",
                        hit=hit,
                        without=without,
                    ),
                )


def _sign(off: float, evidence: Evidence) -> Sign:
    return Sign(strength=Strength.COMPUTED, margin=off / _OFF, evidence=(evidence,))


RULE = Rule(
    name="load_mismatch",
    cause=Cause.MEASUREMENT,
    needs=(
        ("arms.input_tokens_per_s", "arms.request_throughput", "arms.prompt_tokens"),
        ("arms.prompt_tokens_start", "arms.prompt_tokens_end"),
    ),
    find=find,
    fixes=(
        Fix(text="send the same prompts in both arms, and check the token counts of the answers"),
        Fix(text="compare requests of equal length, or times by computed tokens"),
    ),
)
