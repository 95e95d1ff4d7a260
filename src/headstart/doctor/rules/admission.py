"""Requests wait while there is room: a setting limits what is admitted.

    waiting > running, KV usage < 50 %

Not said where the request at the head does not fit: that is a matter of order. Where it is told how
many may run at once, that is the setting if as many do; else what they wait for may be computing.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.doctor.split import queued_s

_HALF = 0.5


def find(known: Known) -> Iterator[Sign]:
    """Arms that hold requests back."""
    for arm in known.situations:
        told = arm.numbers("kv_usage", "waiting", "running")
        if told is None or told[0] >= _HALF or told[1] <= max(1.0, told[2]) or not told[2]:
            continue
        if arm.number("largest_waiting") is not None or arm.number("num_hits") == 0.0:
            continue
        margin, most = arm.number("admission_margin"), arm.number("max_num_seqs")
        is_reached = most is not None and TOLERANCE * told[2] >= most
        beside = "; admission keeps {arm.admission_margin} free" if margin else ""
        beside += "; {arm.max_num_seqs} may run at once" if is_reached else ""
        strength = Strength.HINTED if most else Strength.COMPARED
        yield Sign(
            strength=Strength.COMPUTED if margin or is_reached else strength,
            margin=min(ratio(_HALF, told[0]), ratio(told[1], told[2])),
            explained_s=queued_s(known, arm),
            evidence=(
                say(
                    "{arm.waiting} wait and {arm.running} run, with {arm.kv_usage} of the KV in use"
                    + beside,
                    arm=arm,
                ),
            ),
        )


RULE = Rule(
    name="admission",
    cause=Cause.CONFIGURATION,
    needs=(("arms.kv_usage", "arms.waiting", "arms.running"),),
    find=find,
    fixes=(
        Fix(engine="vllm", text="raise --max-num-seqs and --max-num-batched-tokens"),
        Fix(
            engine="sglang", text="lower --schedule-conservativeness, raise --max-running-requests"
        ),
        Fix(engine="tensorrt-llm", text="raise max_batch_size, max_num_tokens; MAX_UTILIZATION"),
        Fix(engine="llama.cpp", text="raise --parallel"),
    ),
)
