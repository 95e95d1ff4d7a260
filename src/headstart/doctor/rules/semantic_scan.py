"""A flat index that is scanned for every request.

    search time ~ entries * dimension * 4 bytes / memory bandwidth

At 768 dimensions and 10 GB/s, 300,000 entries take 0.1 s.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_MANY = 3e5
_SHARE = 0.5


def find(known: Known) -> Iterator[Sign]:
    """Arms whose index is flat and large."""
    for arm in known.situations:
        entries, search = arm.number("entries"), arm.number("ann")
        if arm.text("index") != "flat" or entries is None or entries <= _MANY:
            continue
        dominates = search is not None and search > _SHARE * (arm.number("embed") or 0.0)
        took = ", {arm.ann} a search" if search is not None else ""
        yield Sign(
            strength=Strength.COMPUTED if dominates else Strength.HINTED,
            margin=ratio(entries, _MANY),
            explained_s=search,
            evidence=(say("a flat index of {arm.entries} entries" + took, arm=arm),),
        )


RULE = Rule(
    name="semantic_scan",
    cause=Cause.SEMANTIC_CACHE,
    needs=(("arms.index", "arms.entries", "arms.ann"),),
    find=find,
    fixes=(Fix(text="a graph index (HNSW) above some 20,000 entries; a cap and a TTL on entries"),),
)
