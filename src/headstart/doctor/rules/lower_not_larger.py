"""A lower tier that is no larger than the one above it holds nothing more.

    host pool <= device pool

What is written through is in both; and SGLang before 0.5.10 read ahead into 0.8 * (host - device)
tokens, which is none.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_LARGER = 1.1


def find(known: Known) -> Iterator[Sign]:
    """Arms whose host pool is too small to matter."""
    for arm in known.situations:
        told = arm.numbers("host_pool_tokens", "pool_tokens")
        if told is None or not told[0] or told[0] > _LARGER * told[1]:
            continue
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(_LARGER * told[1], told[0]),
            evidence=(
                say(
                    "the host pool has room for {arm.host_pool_tokens}, the device for "
                    "{arm.pool_tokens}: it holds nothing more",
                    arm=arm,
                ),
            ),
        )


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
