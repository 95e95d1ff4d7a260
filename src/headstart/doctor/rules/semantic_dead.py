"""A semantic cache that is asked every time and never answers.

    hits = 0, embeddings = requests

Something before it (an exact key, another scope or model) filters all entries out. Below 1 %.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_NONE = 0.01
_EMBEDS = 0.5


def find(known: Known) -> Iterator[Sign]:
    """Arms that pay for nothing."""
    for arm in known.situations:
        hits, embeds = arm.number("semantic_hit_rate"), arm.number("embeds_per_request")
        if hits is None or hits > _NONE or embeds is None or embeds < _EMBEDS:
            continue
        known_repeats = arm.says("is_repeat", True) or (arm.number("shareable_share") or 0.0) > 0.0
        cost = (arm.number("embed") or 0.0) + (arm.number("ann") or 0.0)
        yield Sign(
            strength=Strength.SEEN if known_repeats else Strength.COMPARED,
            margin=min(ratio(_NONE, hits), ratio(embeds, _EMBEDS)),
            explained_s=cost or None,
            evidence=(
                say(
                    "{arm.semantic_hit_rate} hits, and {arm.embeds_per_request} embeddings a "
                    "request",
                    arm=arm,
                ),
            ),
        )


RULE = Rule(
    name="semantic_dead",
    cause=Cause.SEMANTIC_CACHE,
    needs=(("arms.semantic_hit_rate", "arms.embeds_per_request", "arms.embed"),),
    find=find,
    fixes=(
        Fix(
            text="ask the same question twice: the second has to hit; else look at filters and keys"
        ),
        Fix(text="check that threshold and distance mean the same in store and check"),
    ),
)
