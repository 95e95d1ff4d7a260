"""No room in the device cache: what was computed is thrown away and computed again.

    tokens computed again / tokens computed > 5 %
    preemptions / requests > 1 %
    requests wait while the KV cache is full

The recompute tax: of reported servers, those with complaints paid 10 to 80 %; at 5 % it is a
twentieth of all prefill.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import is_low, ratio
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.doctor.split import queued_s

_TAX = 0.05
_PREEMPTED = 0.01
_SOME = 10.0
_FULL = 0.8
_WAITING = 3.0


def find(known: Known) -> Iterator[Sign]:
    """Arms that preempt, or wait for KV."""
    for arm in known.situations:
        sign = _tax(known, arm) or _preempted(known, arm) or _waiting(known, arm)
        if sign is not None:
            yield sign


def _tax(known: Known, arm: Group) -> Sign | None:
    tax = arm.number("recomputed_share")
    if tax is None or tax <= _TAX:
        return None
    return Sign(
        strength=Strength.SEEN,
        margin=ratio(tax, _TAX),
        explained_s=queued_s(known, arm),
        share=tax,
        evidence=(say("{arm.recomputed_share} of the tokens are computed again", arm=arm),),
    )


def _preempted(known: Known, arm: Group) -> Sign | None:
    count, requests = arm.number("num_preemptions"), arm.number("num_requests")
    if not count or is_low(arm.number("kv_usage"), 0.5):
        return None
    margin = ratio(count, _PREEMPTED * requests) if requests else ratio(count, _SOME)
    queued = arm.numbers("waiting", "running")
    crowded = queued is not None and queued[0] > _WAITING * queued[1]
    if crowded:
        margin = max(margin, ratio(queued[0], _WAITING * queued[1])) if queued else margin
    if margin < 1.0:
        return None
    beside = ", {arm.running} running and {arm.waiting} waiting" if crowded else ""
    of = " of {arm.num_requests} requests" if requests else ""
    return Sign(
        strength=Strength.COMPUTED if requests or crowded else Strength.HINTED,
        margin=margin,
        explained_s=queued_s(known, arm),
        evidence=(say("{arm.num_preemptions} preemptions" + of + beside, arm=arm),),
    )


def _waiting(known: Known, arm: Group) -> Sign | None:
    told = arm.numbers("kv_usage", "waiting", "running")
    if told is None or told[0] < _FULL or told[1] <= max(1.0, told[2]):
        return None
    return Sign(
        strength=Strength.COMPARED,
        margin=min(ratio(told[0], _FULL), ratio(told[1], told[2])),
        explained_s=queued_s(known, arm),
        evidence=(
            say(
                "{arm.waiting} wait and {arm.running} run with {arm.kv_usage} of the KV in use",
                arm=arm,
            ),
        ),
    )


RULE = Rule(
    name="preemption",
    cause=Cause.NO_ROOM,
    needs=(
        ("arms.num_preemptions", "arms.num_requests"),
        ("arms.kv_usage", "arms.waiting", "arms.running"),
        ("arms.recomputed_share",),
    ),
    find=find,
    fixes=(
        Fix(
            engine="vllm",
            text="lower --max-num-seqs or --max-model-len to what the KV holds; "
            "--kv-cache-dtype fp8; only then raise --gpu-memory-utilization",
        ),
        Fix(engine="vllm", text="--swap-space larger, or --preemption-mode", before="0.11"),
        Fix(
            engine="sglang",
            text="raise --schedule-conservativeness, lower --max-running-requests, "
            "raise --mem-fraction-static",
        ),
        Fix(
            engine="tensorrt-llm",
            text="capacity scheduler GUARANTEED_NO_EVICT; free_gpu_memory_fraction",
        ),
        Fix(text="more replicas, or a tier below the device so that evicted KV is loaded back"),
    ),
)
