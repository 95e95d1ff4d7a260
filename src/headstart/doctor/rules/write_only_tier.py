"""A tier that is written and never read.

    bytes read < 1 % of bytes written, while something could be hit

Not said where the device hits what there is, nor after a restart (that is another rule).
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import hit_share, ratio, subject
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_NONE = 0.01


def find(known: Known) -> Iterator[Sign]:
    """Tiers that only take."""
    arm = subject(known) or known.situations[0]
    hits, possible = hit_share(arm), arm.number("shareable_share")
    for tier in known.tiers:
        told = tier.numbers("read", "written")
        if told is None or not told[1] or told[0] >= _NONE * told[1]:
            continue
        if tier.says("restarted", True) or (hits is not None and hits > 0.5 * (possible or 1.0)):
            continue
        if not possible and not arm.says("is_repeat", True):
            continue  # counters alone do not tell that anything was asked twice
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(_NONE * told[1], told[0]),
            share=1.0,
            evidence=(say("{tier.name}: {tier.written} written, {tier.read} read", tier=tier),),
        )


RULE = Rule(
    name="write_only_tier",
    cause=Cause.CONFIGURATION,
    needs=(("tiers.read", "tiers.written", "arms.shareable_share"),),
    find=find,
    fixes=(
        Fix(
            engine="sglang",
            text="--hicache-write-policy write_through, --hicache-storage-prefetch-policy timeout "
            "or wait_complete, a lower prefetch_threshold",
        ),
        Fix(engine="vllm", text='"kv_role": "kv_both" in --kv-transfer-config'),
        Fix(text="ask one prompt twice with the device cache emptied between: it has to be read"),
    ),
)
