"""What to measure next: keys that would let more rules speak. Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set

from headstart.doctor.facts import Known
from headstart.doctor.findings import Cause, Rule
from headstart.doctor.vocabulary import LISTS

_MAX_LINES = 6
_FIRST = (
    "arms.ttft_p50: one arm with cache = \"off\" and one with cache = \"warm\", the same load",
    "arms.hit_rate: share of the prompt tokens that were not computed",
    "arms.queue, arms.lookup, arms.load, arms.prefill: where the time goes",
)  # fmt: skip


def missing(
    known: Known, rules: Sequence[Rule], spoken: set[str], causes: Set[Cause]
) -> tuple[str, ...]:
    """A line for each key that is worth measuring, the most useful first.

    Useful is what completes a rule that already has most of what it needs; where causes were found,
    one of those, or of the plausibility of it all.
    """
    if not known.num_facts:
        return _FIRST
    worth: dict[str, float] = {}
    for rule in rules:
        if rule.name in spoken or (causes and rule.cause not in causes | {Cause.MEASUREMENT}):
            continue
        for needed in rule.needs:
            absent = [key for key in needed if not _is_told(known, key)]
            if len(absent) < len(needed) and 0 < len(absent) <= 2:
                for key in absent:
                    have = (len(needed) - len(absent)) / len(needed) / len(absent)
                    worth[key] = worth.get(key, 0.0) + have
    lines = []
    if (
        not any(_is_told(known, key) for key in ("arms.ttft_p50", "arms.ttft_mean"))
        or len({arm.text("cache") for arm in known.arms} - {""}) < 2
    ):
        lines.append(_FIRST[0])
    ranked = sorted(worth, key=lambda key: (-worth[key], key))
    lines += [f"{key}: {_description(key)}" for key in ranked]
    return tuple(lines[:_MAX_LINES])


def _is_told(known: Known, path: str) -> bool:
    scope, _, key = path.partition(".")
    groups = known.situations if scope == "arms" else getattr(known, scope)
    if scope == "arms" and key == "cache":
        return bool(known.arms)
    return any(group.fact(key) is not None for group in groups)


def _description(path: str) -> str:
    scope, _, key = path.partition(".")
    return LISTS[scope].model_fields[key].description or ""
