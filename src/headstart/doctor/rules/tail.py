"""Most first tokens are soon, a few are terribly late, and misses do not explain it.

    p99 / p50 > 10, p90 / p50 < 2
    or, without a p90: loads' p99 / median > 10, and the loads' p99 makes up the first token's

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
        parted = _parted(arm, *told)
        if parted is None or _is_miss(known, arm, told[1]):
            continue
        unbound = arm.says("numa_bound", False) and (arm.number("numa_nodes") or 2.0) > 1.0
        pageable = arm.says("pinned", False)
        why = "; workers are not bound to a NUMA node" if unbound else ""
        why += "; host memory is not pinned" if pageable else ""
        yield Sign(
            strength=Strength.COMPARED if why else Strength.HINTED,
            margin=min(ratio(told[1], _TAIL * told[0]), parted[0]),
            share=1.0 if why else None,
            evidence=(
                say("p50 {arm.ttft_p50}, " + parted[1] + "p99 {arm.ttft_p99}" + why, arm=arm),
            ),
        )


def _parted(arm: Group, median_s: float, tail_s: float) -> tuple[float, str] | None:
    """What parts the few from the rest: how many times over its bound, and what to say of it."""
    body = arm.number("ttft_p90")
    if body is not None:
        over = ratio(_BODY * median_s, body)
        return (over, "p90 {arm.ttft_p90}, ") if over >= 1.0 else None
    loads = arm.numbers("load", "load_p99")
    if loads is None or loads[1] <= _TAIL * loads[0] or loads[1] * TOLERANCE < tail_s:
        return None
    return ratio(loads[1], _TAIL * loads[0]), "loads {arm.load}, at p99 {arm.load_p99}; "


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
        ("arms.ttft_p50", "arms.ttft_p99", "arms.load", "arms.load_p99", "arms.hit_rate"),
    ),
    find=find,
    fixes=(
        Fix(engine="sglang", text="--hicache-numa-detect, --numa-node"),
        Fix(text="numactl --cpunodebind --membind (or interleave), the NIC and the device's node"),
        Fix(text="take a trace of one slow request: where does it wait"),
    ),
)
