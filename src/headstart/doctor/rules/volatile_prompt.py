"""Text that differs by request stands before text that does not: a time, an id, a user's name.

    position of the first difference < half of what was meant to be shared

A prefix cache hits up to the first difference, and nothing after it.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import hitting, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_HALF = 0.5


def find(known: Known) -> Iterator[Sign]:
    """Arms whose prompts differ early."""
    for arm in hitting(known):
        told = arm.numbers("first_difference", "template_tokens")
        if told is None or told[0] >= _HALF * told[1]:
            continue
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(_HALF * told[1], told[0]),
            share=1.0 - told[0] / told[1],
            evidence=(
                say(
                    "prompts differ after {arm.first_difference}, and were meant to share "
                    "{arm.template_tokens}",
                    arm=arm,
                ),
            ),
        )


RULE = Rule(
    name="volatile_prompt",
    cause=Cause.CONFIGURATION,
    needs=(("arms.first_difference", "arms.template_tokens"),),
    find=find,
    fixes=(
        Fix(text="move times, ids and names behind the text that is shared"),
        Fix(text="tools and examples in one order; no random seeds in the system prompt"),
    ),
)
