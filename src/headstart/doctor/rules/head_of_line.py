"""Small requests wait behind large ones.

    TTFT of short prompts in the mix / alone > 5
    free KV >= smallest waiting prompt, and nothing admitted for 10 steps

Where one worker loads for all, and loads time out, the wait may be that of `one_worker`, so that
this says only where. In a batch a short prompt shares its steps with others, which costs it a few
times its own time; more is waiting for somebody else's.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import one_loader, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.doctor.split import queued_s

_SLOWER = 5.0
_STEPS = 10.0


def find(known: Known) -> Iterator[Sign]:
    """Arms with a convoy."""
    for arm in known.situations:
        told = arm.numbers("ttft_short", "ttft_short_alone")
        if told is not None and told[0] > _SLOWER * told[1]:
            yield Sign(
                strength=Strength.COMPUTED,
                is_symptom=any(one_loader(tier) for tier in known.tiers),
                margin=ratio(told[0], _SLOWER * told[1]),
                share=1.0 - told[1] / told[0],
                evidence=(
                    say(
                        "short prompts take {arm.ttft_short} in the mix, {arm.ttft_short_alone} "
                        "alone",
                        arm=arm,
                    ),
                ),
            )
        frozen = arm.numbers("free_tokens", "smallest_waiting", "steps_without_admission")
        if frozen is not None and frozen[0] >= frozen[1] and frozen[2] > _STEPS:
            yield Sign(
                strength=Strength.SEEN,
                margin=min(ratio(frozen[0], frozen[1]), ratio(frozen[2], _STEPS)),
                explained_s=queued_s(known, arm),
                evidence=(
                    say(
                        "nothing was admitted for {arm.steps_without_admission} steps, with "
                        "{arm.free_tokens} free and a request of {arm.smallest_waiting} waiting",
                        arm=arm,
                    ),
                ),
            )


RULE = Rule(
    name="head_of_line",
    cause=Cause.ROUTING,
    needs=(
        ("arms.ttft_short", "arms.ttft_short_alone"),
        ("arms.free_tokens", "arms.smallest_waiting", "arms.steps_without_admission"),
    ),
    find=find,
    fixes=(
        Fix(
            engine="vllm",
            text="--max-long-partial-prefills 1 --long-prefill-token-threshold N, or a lower "
            "--max-num-batched-tokens",
        ),
        Fix(
            engine="sglang",
            text="--chunked-prefill-size smaller; --schedule-policy lpm or dfs-weight",
        ),
        Fix(text="long prompts on replicas of their own"),
    ),
)
