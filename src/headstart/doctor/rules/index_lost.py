"""After a restart the data is there, and nobody knows.

bytes on the medium > 0, hits ~ 0, the same bytes are written again
bytes in use as the cache says < half of what is on the medium: no eviction in time
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import hit_share, ratio, subject
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_NONE = 0.05
_HALF = 0.5


def find(known: Known) -> Iterator[Sign]:
    """Tiers that forgot what they hold."""
    arm = subject(known) or known.situations[0]
    hits = hit_share(arm)
    hits = arm.number("num_hits") if hits is None else hits
    for tier in known.tiers:
        if not tier.says("restarted", True):
            continue
        told = tier.numbers("used", "reported_used")
        if told is not None and told[1] < _HALF * told[0]:
            yield Sign(
                strength=Strength.SEEN,
                margin=ratio(_HALF * told[0], told[1]),
                evidence=(
                    say(
                        "after a restart {tier.name} reports {tier.reported_used} in use, and "
                        "{tier.used} are there",
                        tier=tier,
                    ),
                ),
            )
        again = tier.number("rewritten")
        if tier.number("used") and hits is not None and hits < _NONE and again != 0.0:
            yield Sign(
                strength=Strength.SEEN if again else Strength.COMPARED,
                margin=ratio(_NONE, hits),
                share=1.0,
                evidence=(
                    say(
                        "after a restart {tier.name} has {tier.used} on it and hits nothing"
                        + ("; {tier.rewritten} were written again" if again else ""),
                        tier=tier,
                    ),
                ),
            )


RULE = Rule(
    name="index_lost",
    cause=Cause.COLD_START,
    needs=(
        ("tiers.restarted", "tiers.used", "arms.hit_rate"),
        ("tiers.used", "tiers.reported_used"),
    ),
    find=find,
    fixes=(
        Fix(
            engine="lmcache",
            text="a backend that recovers its index at start, or a server of its own",
        ),
        Fix(text="warm up after a start: send the common prefixes before traffic comes"),
        Fix(text="`headstart node` outlives the engine, and its file tier a restart of both"),
    ),
)
