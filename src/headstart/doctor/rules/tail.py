"""Most first tokens are soon, a few are terribly late, and misses do not explain it.

    p99 / p50 > 10, p90 / p50 < 2

Memory or a link on the wrong side of the machine serves some requests: those whose buffers or
threads lie on the other NUMA node. If p99 is what computing takes, it is a miss and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, hit_share, hitting, prefill_rate, ratio
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_TAIL = 10.0
_BODY = 2.0


def find(known: Known) -> Iterator[Sign]:
    """Arms with such a tail."""
    for arm in hitting(known):
        told = arm.numbers("ttft_p50", "ttft_p99")
        if told is None or told[1] <= _TAIL * told[0] or (hit_share(arm) or 0.0) < 0.5:
            continue
        body = arm.number("ttft_p90")
        if body is None or body > _BODY * told[0] or _is_miss(known, arm, told[1]):
            continue
        unbound = arm.says("numa_bound", False) and (arm.number("numa_nodes") or 2.0) > 1.0
        pageable = arm.says("pinned", False)
        why = "; workers are not bound to a NUMA node" if unbound else ""
        why += "; host memory is not pinned" if pageable else ""
        yield Sign(
            strength=Strength.COMPARED if why else Strength.HINTED,
            margin=min(ratio(told[1], _TAIL * told[0]), ratio(_BODY * told[0], body)),
            share=1.0 if why else None,
            evidence=(
                say("p50 {arm.ttft_p50}, p90 {arm.ttft_p90}, p99 {arm.ttft_p99}" + why, arm=arm),
            ),
        )


def _is_miss(known: Known, arm: Group, tail_s: float) -> bool:
    """Whether a prompt that is computed as a whole takes as long."""
    rate, prompt = prefill_rate(known), arm.number("prompt")
    cold = [other.number("ttft") for other in known.arms if other.text("cache") in ("off", "cold")]
    computed = [each for each in (*cold, prompt / rate if rate and prompt else None) if each]
    return any(tail_s < TOLERANCE * each for each in computed)


RULE = Rule(
    name="tail",
    cause=Cause.BANDWIDTH_CONTENTION,
    needs=(
        ("arms.ttft_p50", "arms.ttft_p90", "arms.ttft_p99", "arms.hit_rate", "arms.numa_bound"),
    ),
    find=find,
    fixes=(
        Fix(engine="sglang", text="--hicache-numa-detect, --numa-node"),
        Fix(text="numactl --cpunodebind --membind (or interleave), the NIC and the device's node"),
        Fix(text="take a trace of one slow request: where does it wait"),
    ),
)
