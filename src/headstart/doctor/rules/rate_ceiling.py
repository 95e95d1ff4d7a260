"""Tokens that cannot have been computed so fast.

    tokens computed / TTFT <= FLOP/s / (2 * parameters)

A token takes at least two operations a parameter (Kaplan et al. 2020, section 2.1). Prefill reaches
a third to a half of the data sheet's figure, so there is slack in the bound itself. Where only the
prefill rate of one prompt alone is told, `TOLERANCE` times that is the bound. Hits may be a quarter
more than told, so that a few tokens left to compute do not look like many.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, hit_tokens, ratio
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_HITS_MORE = 1.25


def find(known: Known) -> Iterator[Sign]:
    """An arm whose prompts were computed faster than the machine can."""
    for arm in known.situations:
        told = arm.numbers("prompt", "ttft")
        hit = 0.0 if arm.text("cache") in ("off", "cold") else hit_tokens(arm)
        ceiling = _ceiling(arm)
        if told is None or hit is None or ceiling is None or not told[1]:
            continue
        rate = max(0.0, told[0] - _HITS_MORE * hit) / told[1]
        if rate > ceiling:
            yield Sign(
                strength=Strength.SEEN,
                margin=ratio(rate, ceiling),
                evidence=(
                    say(
                        "{arm.prompt} computed by a first token after {arm.ttft}: {rate:,.0f} "
                        "tokens/s; this machine computes at most {ceiling:,.0f}",
                        arm=arm,
                        rate=rate,
                        ceiling=ceiling,
                    ),
                ),
            )


def _ceiling(arm: Group) -> float | None:
    told = arm.numbers("device_flops", "model_params")
    if told is not None and told[1]:
        return told[0] / (2.0 * told[1])
    alone = arm.number("prefill_rate")
    return alone * TOLERANCE if alone else None


RULE = Rule(
    name="rate_ceiling",
    cause=Cause.MEASUREMENT,
    needs=(("arms.prompt_tokens", "arms.ttft_p50", "arms.device_flops", "arms.model_params"),),
    find=find,
    fixes=(
        Fix(text="send prompts that nothing has seen before: a salt at the start of each run"),
        Fix(text="count the first token that has text; an empty first chunk is none"),
    ),
)
