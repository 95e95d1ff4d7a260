"""A threshold that lets wrong answers through: no single cut separates them.

similarity of questions with different answers >= threshold
share of hits that fit < what is wanted (75 % where nothing is told)
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_TARGET = 0.75


def find(known: Known) -> Iterator[Sign]:
    """Arms that answer other questions."""
    for arm in known.situations:
        told = arm.numbers("opposite_similarity", "threshold")
        if told is not None and told[0] >= told[1]:
            paraphrase = arm.number("paraphrase_similarity")
            worse = paraphrase is not None and paraphrase < told[0]
            beside = "; paraphrases only {arm.paraphrase_similarity}" if worse else ""
            yield Sign(
                strength=Strength.SEEN,
                margin=ratio(*told),
                evidence=(
                    say(
                        "questions with other answers are {arm.opposite_similarity} similar, and "
                        "it answers from {arm.threshold}" + beside,
                        arm=arm,
                    ),
                ),
            )
        precision, wanted = arm.number("semantic_precision"), arm.number("semantic_target")
        bound = _TARGET if wanted is None else wanted
        if precision is not None and precision < bound:
            yield Sign(
                strength=Strength.COMPUTED,
                margin=ratio(bound, precision),
                evidence=(say("{arm.semantic_precision} of its answers fit", arm=arm),),
            )


RULE = Rule(
    name="semantic_wrong",
    cause=Cause.SEMANTIC_CACHE,
    needs=(("arms.opposite_similarity", "arms.threshold"), ("arms.semantic_precision",)),
    find=find,
    fixes=(
        Fix(text="a second check of candidates (a cross-encoder), not a higher cut"),
        Fix(text="keep numbers, names and negations out of it: exact match on those"),
        Fix(text="no semantic answers across tenants, system prompts or turns"),
    ),
)
