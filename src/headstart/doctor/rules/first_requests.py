"""Only the first requests after a start are slow, or the cache is still filling.

    TTFT of the first / later > 2
    hit rate at the end / at the start > 2

Compilation, page faults, pinning memory, connections: all are paid once.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_SLOWER = 2.0


def find(known: Known) -> Iterator[Sign]:
    """Arms that are slow at first."""
    for arm in known.situations:
        told = arm.numbers("ttft_first", "ttft")
        if told is not None and told[0] > _SLOWER * told[1]:
            yield Sign(
                strength=Strength.COMPUTED,
                margin=ratio(told[0], _SLOWER * told[1]),
                explained_s=told[0] - told[1],
                evidence=(
                    say(
                        "the first requests after a start take {arm.ttft_first}, later ones "
                        "{arm.ttft}",
                        arm=arm,
                    ),
                ),
            )
        rates = arm.numbers("hit_rate_first", "hit_rate_last")
        if rates is not None and rates[1] > _SLOWER * rates[0] and rates[1] > 0.1:
            yield Sign(
                strength=Strength.COMPARED,
                margin=ratio(rates[1], _SLOWER * rates[0]),
                evidence=(
                    say(
                        "the hit rate grows from {arm.hit_rate_first} to {arm.hit_rate_last}: the "
                        "cache is filling",
                        arm=arm,
                    ),
                ),
            )


RULE = Rule(
    name="first_requests",
    cause=Cause.COLD_START,
    needs=(("arms.ttft_first", "arms.ttft_p50"), ("arms.hit_rate_first", "arms.hit_rate_last")),
    find=find,
    fixes=(
        Fix(text="warm up with requests of every length that comes, before traffic does"),
        Fix(text="keep the cache over restarts: a tier that persists, or a process of its own"),
        Fix(text="touch and pin the pool at start, with several threads"),
    ),
)
