"""What logs and metrics measured, put where it belongs: into no arm that ran without the cache.

Files of a server tell of one run. Where others tell of arms, that run is one of those with the
cache, or, where none of them had it, an arm of its own. What was asked and how it was set up stays
with all arms: they are of the same load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from headstart.doctor.facts import Fact
from headstart.doctor.vocabulary import TOP, Cpu, Hits, Room, Stages, Times

_ARM = "as measured"
_CACHE = ("arms", "cache")
_TIMES = ("ttft_p50", "ttft_mean")
_OF_A_RUN = frozenset(
    key for topic in (Times, Stages, Hits, Room, Cpu) for key in topic.model_fields
) | {"num_requests", "duration"}


def placed(live: Sequence[Fact], told: Sequence[Fact]) -> Iterator[Fact]:
    """`live`, given what other files told: as it is, but for what is not of every arm."""
    arms = {fact.owner: str(fact.value) for fact in told if (fact.scope, fact.key) == _CACHE}
    timed = {fact.owner for fact in told if fact.scope == "arms" and fact.key in _TIMES}
    without = {name for name, cache in arms.items() if cache in ("off", "cold") and name in timed}
    measured = [fact for fact in live if fact.scope == TOP and fact.key in _OF_A_RUN]
    if not without or not measured:
        yield from live
        return
    others = list(dict.fromkeys(fact.owner for fact in told if fact.scope == "arms"))
    others = [name for name in others if name not in without]
    if not others:
        others = [_ARM]
        for key, value in (("name", _ARM), ("cache", "on")):
            source = measured[0].source
            yield Fact(key=key, value=value, source=source, scope="arms", owner=_ARM)
    for fact in live:
        if fact.scope == TOP and fact.key in _OF_A_RUN:
            yield from (replace(fact, scope="arms", owner=name) for name in others)
        else:
            yield fact
