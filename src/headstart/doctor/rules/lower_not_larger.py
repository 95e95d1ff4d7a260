"""A lower tier that is no larger than the one above it holds nothing more.

    host pool <= device pool

What is written through is in both; and SGLang before 0.5.10 read ahead into 0.8 * (host - device)
tokens, which is none. Where it is known how much is in use, the host pool explains at most the part
of it that it would hold: nothing, if the device holds all.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import MATERIAL, ratio, working_set
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_LARGER = 1.1


def find(known: Known) -> Iterator[Sign]:
    """Arms whose host pool is too small to matter."""
    for arm in known.situations:
        told = arm.numbers("host_pool_tokens", "pool_tokens")
        if told is None or not told[0] or told[0] > _LARGER * told[1]:
            continue
        share = _share(arm, *told)
        if share is not None and share < MATERIAL:
            continue
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(_LARGER * told[1], told[0]),
            share=share,
            evidence=(
                say(
                    "the host pool has room for {arm.host_pool_tokens}, the device for "
                    "{arm.pool_tokens}: it holds nothing more",
                    arm=arm,
                ),
            ),
        )


def _share(arm: Group, host: float, device: float) -> float | None:
    """Of what is in use, what the host pool would hold beside the device; None if not told."""
    used = working_set(arm)
    if used is None:
        return None
    return min(host, max(0.0, used - device)) / used


RULE = Rule(
    name="lower_not_larger",
    cause=Cause.CONFIGURATION,
    needs=(("arms.host_pool_tokens", "arms.pool_tokens"),),
    find=find,
    fixes=(
        Fix(engine="sglang", text="--hicache-ratio 2 or more, or --hicache-size in GB a rank"),
        Fix(engine="vllm", text="cpu_bytes_to_use of several times the device's KV"),
        Fix(text="at least twice the device pool, and no less than the working set"),
    ),
)
