"""A tier larger than its limit: the limit is not applied, and the disk fills up.

bytes on the medium / capacity > 1.5
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength


def find(known: Known) -> Iterator[Sign]:
    """Tiers beyond their limit."""
    for tier in known.tiers:
        told = tier.numbers("used", "capacity")
        if told is None or ratio(*told) <= TOLERANCE:
            continue
        yield Sign(
            strength=Strength.SEEN,
            margin=ratio(*told) / TOLERANCE,
            evidence=(
                say("{tier.name} holds {tier.used} with a limit of {tier.capacity}", tier=tier),
            ),
        )


RULE = Rule(
    name="over_capacity",
    cause=Cause.CONFIGURATION,
    needs=(("tiers.used", "tiers.capacity"),),
    find=find,
    fixes=(
        Fix(engine="lmcache", text="LocalDiskBackend with max_local_disk_size: others have no cap"),
        Fix(engine="vllm", text="the fs tier has no limit: clean it up from outside"),
        Fix(text="a file system or quota of its own for the cache"),
    ),
)
