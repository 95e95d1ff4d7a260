"""A hit rate that falls as more is in flight, or as the run goes on, while the load stays alike.

    hit rate at few in flight / at many > 1.5
    hit rate at the start / at the end > 1.5

The knee is where the working set of what is in flight exceeds the pool.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, alike, hitting, is_low, ratio
from headstart.doctor.facts import Evidence, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength


def find(known: Known) -> Iterator[Sign]:
    """Arms of a sweep of concurrency, or one that decays."""
    for arm in hitting(known):
        told = arm.numbers("hit_rate_first", "hit_rate_last")
        if told is not None and told[0] > TOLERANCE * told[1] and not is_low(told[0]):
            yield _sign(
                ratio(told[0], TOLERANCE * told[1]),
                say("the hit rate falls from {arm.hit_rate_first} to {arm.hit_rate_last}", arm=arm),
            )
    sweep = [arm for arm in hitting(known) if arm.numbers("concurrency", "hit_rate")]
    if len(sweep) < 2:
        return
    sweep.sort(key=lambda arm: arm.number("concurrency") or 0.0)
    few, many = sweep[0], sweep[-1]
    before, after = few.number("hit_rate") or 0.0, many.number("hit_rate") or 0.0
    if (many.number("concurrency") or 0.0) <= TOLERANCE * (few.number("concurrency") or 0.0):
        return
    if alike(few, many, but="concurrency") and before > TOLERANCE * after and not is_low(before):
        yield _sign(
            ratio(before, TOLERANCE * after),
            say(
                "{few.hit_rate} hit with {few.concurrency} in flight, {many.hit_rate} with "
                "{many.concurrency}",
                few=few,
                many=many,
            ),
        )


def _sign(margin: float, evidence: Evidence) -> Sign:
    return Sign(strength=Strength.COMPARED, margin=margin, evidence=(evidence,))


RULE = Rule(
    name="hit_knee",
    cause=Cause.EVICTION_THRASH,
    needs=(("arms.concurrency", "arms.hit_rate"), ("arms.hit_rate_first", "arms.hit_rate_last")),
    find=find,
    fixes=(
        Fix(text="keep concurrency below the knee, or give the pool what is beyond it"),
        Fix(text="cap what one request or one path may keep (states, checkpoints, branches)"),
        Fix(engine="vllm", text="--max-num-seqs at the knee"),
        Fix(engine="sglang", text="--max-running-requests at the knee"),
    ),
)
