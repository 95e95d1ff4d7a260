"""Hits that stop for good: the cache's state is broken, not full.

    hits in this period = 0, hits in an earlier one > 0, queries > 0, the same prompts come again

With room left (KV usage below 90 %) eviction is no reason. Below 5 % of the earlier period counts
as none: first requests after a change of load still hit their system prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_NONE = 0.05
_FULL = 0.9


def find(known: Known) -> Iterator[Sign]:
    """A period with queries and no hits, after one with hits."""
    for arm in known.situations:
        told = arm.numbers("num_hits", "num_hits_before", "num_queries")
        if told is None or arm.says("is_repeat", False):
            continue
        now, before, queries = told
        usage = arm.number("kv_usage")
        if now >= _NONE * before or not queries or (usage is not None and usage >= _FULL):
            continue
        surely = arm.says("is_repeat", True) and usage is not None
        room = ", with {arm.kv_usage} of the KV cache in use" if usage is not None else ""
        yield Sign(
            strength=Strength.COMPUTED if surely else Strength.COMPARED,
            margin=ratio(_NONE * before, now),
            evidence=(
                say(
                    "{arm.num_hits} hits of {arm.num_queries} queries, {arm.num_hits_before} in "
                    "the period before" + room,
                    arm=arm,
                ),
            ),
        )


RULE = Rule(
    name="frozen_hits",
    cause=Cause.CORRECTNESS,
    needs=(("arms.num_hits", "arms.num_hits_before", "arms.num_queries", "arms.kv_usage"),),
    find=find,
    fixes=(
        Fix(text="restart the engine, note the time until it happens again, and report it"),
        Fix(text="take logs from just before: a failed transfer or an exception in a cache thread"),
    ),
)
