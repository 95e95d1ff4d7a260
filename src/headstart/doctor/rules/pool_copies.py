"""Each step handles the whole pool: the larger the pool, the slower, with the same load.

    throughput (small pool) / throughput (large pool) > 1.5, the pool at least 1.5 times as large
    step (large pool) / step (small pool) > 1.5, likewise

A step's work depends on the tokens in it, never on what is held besides.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, alike, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength


def find(known: Known) -> Iterator[Sign]:
    """A sweep of pool sizes that slows down."""
    for key, is_time in (("throughput", False), ("step", True)):
        sweep = [arm for arm in known.arms if arm.numbers("pool_tokens", key)]
        if len(sweep) < 2:
            continue
        sweep.sort(key=lambda arm: arm.number("pool_tokens") or 0.0)
        small, large = sweep[0], sweep[-1]
        more, less = (large, small) if is_time else (small, large)
        larger = ratio(large.number("pool_tokens") or 0.0, small.number("pool_tokens") or 0.0)
        slower = ratio(more.number(key) or 0.0, less.number(key) or 0.0)
        if alike(small, large, but="pool_tokens") and min(larger, slower) > TOLERANCE:
            yield Sign(
                strength=Strength.COMPUTED,
                margin=min(larger, slower) / TOLERANCE,
                share=1.0 - 1.0 / slower,
                evidence=(
                    say(
                        f"{key}: {{small.{key}}} with a pool of {{small.pool_tokens}}, "
                        f"{{large.{key}}} with {{large.pool_tokens}}",
                        small=small,
                        large=large,
                    ),
                ),
            )


RULE = Rule(
    name="pool_copies",
    cause=Cause.SERIALIZATION,
    needs=(("arms.pool_tokens", "arms.throughput"), ("arms.pool_tokens", "arms.step")),
    find=find,
    fixes=(
        Fix(
            text="a smaller pool (gpu_memory_utilization) until the copy of the whole cache is gone"
        ),
        Fix(text="profile a step: a copy or a scan whose length is the number of blocks"),
    ),
)
