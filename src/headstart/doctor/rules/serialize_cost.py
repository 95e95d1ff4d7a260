"""Packing takes longer than moving.

    serialising / transfer > 1, or / load > 50 %, or / TTFT > 20 %
    preparing (descriptors, planning, submitting) / transfer > 50 %

KV blocks are plain bytes already: a copy at memory speed is all that a transfer needs. At half of
the transfer, preparing is a third of both.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Evidence, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_HALF = 0.5
_SHARE = 0.2


def find(known: Known) -> Iterator[Sign]:
    """Arms that pack, or prepare, for long."""
    for arm in known.situations:
        packing, moving = arm.number("serialize"), arm.number("transfer")
        for bound, key in (
            (moving, "transfer"),
            (_HALF * (arm.number("load") or 0.0), "load"),
            (_SHARE * (arm.number("ttft") or 0.0), "ttft"),
        ):
            if packing and bound and packing > bound:
                yield _sign(
                    ratio(packing, bound),
                    packing,
                    say(
                        f"{{arm.serialize}} to serialise, against {{arm.{key}}} for the {key}",
                        arm=arm,
                    ),
                )
                break
        preparing = arm.number("prepare")
        if preparing and moving and preparing > _HALF * moving:
            yield _sign(
                ratio(preparing, _HALF * moving),
                preparing,
                say("{arm.prepare} to prepare a transfer of {arm.transfer}", arm=arm),
            )


def _sign(margin: float, seconds: float, evidence: Evidence) -> Sign:
    return Sign(strength=Strength.SEEN, margin=margin, explained_s=seconds, evidence=(evidence,))


RULE = Rule(
    name="serialize_cost",
    cause=Cause.SERIALIZATION,
    needs=(("arms.serialize", "arms.transfer"), ("arms.prepare", "arms.transfer")),
    find=find,
    fixes=(
        Fix(engine="lmcache", text="remote_serde: naive"),
        Fix(text="write raw bytes from registered memory: no pickle, no safetensors per block"),
        Fix(text="build descriptors in arrays, in one call for a batch; keep them for the next"),
    ),
)
