"""Answers that differ, or are garbage, when they come from the cache.

    share of greedy answers that differ, hit against miss > what differs between two misses
    garbage on hits > garbage on misses
    quality score, without / with hits > 1.1

In bfloat16 a model alone answers differently when its batch is cut elsewhere (5 of 16 long prompts
in benchmarks/engine_equality.py), so what two misses differ by is the measure; where it is not
told, a third. Below one in a hundred nothing is said. Scores of a few hundred questions differ by
some percent by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, pairs, ratio
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_LEAST = 0.01
_MODEL_ALONE = 0.33
_SCORE = 1.1


def find(known: Known) -> Iterator[Sign]:
    """Arms, or all there is, with wrong answers."""
    for arm in known.situations:
        yield from _differing(arm)
        yield from _garbled(arm)
    for pair in pairs(known):
        told = pair.without.number("score"), pair.hit.number("score")
        if told[0] is None or not told[1] or told[0] <= _SCORE * told[1]:
            continue
        lossy = pair.hit.says("is_lossy", True)
        yield Sign(
            strength=Strength.COMPUTED if lossy else Strength.COMPARED,
            margin=ratio(told[0], _SCORE * told[1]),
            evidence=(
                say(
                    "the score falls from {without.score} to {hit.score} with hits"
                    + (", and the codec {hit.serde} changes values" if lossy else ""),
                    without=pair.without,
                    hit=pair.hit,
                ),
            ),
        )


def _differing(arm: Group) -> Iterator[Sign]:
    differing = arm.number("differing_share")
    if differing is None:
        return
    alone = arm.number("noise_differing_share")
    bound = max(_LEAST, _MODEL_ALONE if alone is None else TOLERANCE * alone)
    if differing > bound:
        beside = "" if alone is None else "; two misses differ in {arm.noise_differing_share}"
        yield Sign(
            strength=Strength.COMPARED if alone is None else Strength.SEEN,
            margin=ratio(differing, bound),
            evidence=(
                say(
                    "{arm.differing_share} of the greedy answers differ between hit and miss"
                    + beside,
                    arm=arm,
                ),
            ),
        )


def _garbled(arm: Group) -> Iterator[Sign]:
    garbled, on_miss = arm.number("garbled_share"), arm.number("garbled_share_miss")
    if garbled is None:
        return
    bound = max(_LEAST, TOLERANCE * (on_miss or 0.0))
    if garbled > bound:
        beside = "" if on_miss is None else ", {arm.garbled_share_miss} on misses"
        yield Sign(
            strength=Strength.COMPARED if on_miss is None else Strength.SEEN,
            margin=ratio(garbled, bound),
            evidence=(say("{arm.garbled_share} of the answers are garbage" + beside, arm=arm),),
        )


RULE = Rule(
    name="wrong_answers",
    cause=Cause.CORRECTNESS,
    needs=(
        ("arms.differing_share", "arms.noise_differing_share"),
        ("arms.garbled_share", "arms.garbled_share_miss"),
    ),
    find=find,
    fixes=(
        Fix(text="stop serving from the cache until hits and misses answer alike"),
        Fix(engine="vllm", text="--no-enable-prefix-caching, or take --kv-transfer-config away"),
        Fix(engine="sglang", text="--disable-radix-cache, or without --enable-hierarchical-cache"),
        Fix(engine="lmcache", text="remote_serde: naive instead of cachegen"),
        Fix(text="then find the tier: turn them on one at a time, with the same greedy prompts"),
    ),
)
