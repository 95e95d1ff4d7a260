"""Bookkeeping on the scheduler's thread that every step pays for.

    bookkeeping / step > 5 %

It grows with running requests, and is paid by all of them: prefill takes several steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_SHARE = 0.05


def find(known: Known) -> Iterator[Sign]:
    """Arms in which the cache's bookkeeping is a part of the step."""
    for arm in known.situations:
        told = arm.numbers("step_cpu", "step")
        if told is None or ratio(*told) <= _SHARE:
            continue
        beside = ", with {arm.running} running" if arm.number("running") else ""
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(*told) / _SHARE,
            share=ratio(*told),
            evidence=(
                say("bookkeeping takes {arm.step_cpu} of a step of {arm.step}" + beside, arm=arm),
            ),
        )


RULE = Rule(
    name="step_cpu",
    cause=Cause.LOOKUP_CPU,
    needs=(("arms.step_cpu", "arms.step"),),
    find=find,
    fixes=(
        Fix(text="keep what was registered for a request, and register only what is new"),
        Fix(engine="vllm", text="update; a larger --block-size; a lower --max-num-seqs"),
        Fix(text="a faster core for the scheduler: pin it, and leave it alone"),
    ),
)
