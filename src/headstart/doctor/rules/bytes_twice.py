"""More bytes are moved than are needed: bytes moved / bytes needed > 1.5."""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, ratio, subject
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength


def find(known: Known) -> Iterator[Sign]:
    """Tiers that move too much."""
    for tier in known.tiers:
        told = tier.numbers("moved", "needed")
        if told is None or ratio(*told) <= TOLERANCE:
            continue
        load = (subject(known) or known.top).number("load")
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(*told) / TOLERANCE,
            explained_s=load * (1.0 - told[1] / told[0]) if load else None,
            share=1.0 - told[1] / told[0],
            evidence=(say("{tier.moved} moved for {tier.needed} needed", tier=tier),),
        )


RULE = Rule(
    name="bytes_twice",
    cause=Cause.SERIALIZATION,
    needs=(("tiers.moved", "tiers.needed"),),
    find=find,
    fixes=(
        Fix(text="read into the buffer that is used: no bounce buffer, no second copy"),
        Fix(text="with MLA every rank has the same KV: load once, broadcast on the device"),
    ),
)
