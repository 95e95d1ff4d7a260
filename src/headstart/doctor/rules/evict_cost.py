"""Evicting a block by searching for it.

    evictions a request * time of one = what allocation adds to the first token

A heap or a linked list gives up a block in 10 to 20 us, in Python; ten times that is a scan of the
free list, which begins when the pool is full for the first time.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.units import format_seconds

_SCAN_S = 1.5e-4


def find(known: Known) -> Iterator[Sign]:
    """Arms whose eviction is linear in the pool."""
    for arm in known.situations:
        each, count = arm.number("evict"), arm.number("evictions_per_request")
        if each is None or each <= _SCAN_S:
            continue
        evidence = say("{arm.evict} to evict one block: that is a scan of the pool", arm=arm)
        if count is not None:
            evidence = say(
                "{arm.evict} a block, {arm.evictions_per_request} blocks a request: {total}",
                arm=arm,
                total=format_seconds(each * count),
            )
        yield Sign(
            strength=Strength.SEEN if count is not None else Strength.COMPARED,
            margin=ratio(each, _SCAN_S),
            explained_s=None if count is None else each * count,
            evidence=(evidence,),
        )


RULE = Rule(
    name="evict_cost",
    cause=Cause.LOOKUP_CPU,
    needs=(("arms.evict", "arms.evictions_per_request"),),
    find=find,
    fixes=(
        Fix(engine="vllm", text="update: its evictor searched a list up to 0.5", before="0.6"),
        Fix(text="an evictor that keeps its order (linked list, heap): O(1) or O(log n) a block"),
        Fix(text="a cap on blocks, and idle sessions evicted in the background"),
    ),
)
