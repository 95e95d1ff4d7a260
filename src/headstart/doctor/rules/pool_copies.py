"""Each step handles the whole pool: the larger the pool, the slower, with the same load.

    throughput (small pool) / throughput (large pool) > 1.5, the pool at least 1.5 times as large

A step's work depends on the tokens in it, never on what is held besides.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, alike, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength


def find(known: Known) -> Iterator[Sign]:
    """A sweep of pool sizes that slows down."""
    sweep = [arm for arm in known.arms if arm.numbers("pool_tokens", "throughput")]
    if len(sweep) < 2:
        return
    sweep.sort(key=lambda arm: arm.number("pool_tokens") or 0.0)
    small, large = sweep[0], sweep[-1]
    pools = small.number("pool_tokens") or 0.0, large.number("pool_tokens") or 0.0
    speeds = small.number("throughput") or 0.0, large.number("throughput") or 0.0
    if (
        alike(small, large, but="pool_tokens")
        and pools[1] > TOLERANCE * pools[0]
        and speeds[0] > TOLERANCE * speeds[1]
    ):
        yield Sign(
            strength=Strength.COMPUTED,
            margin=min(
                ratio(pools[1], TOLERANCE * pools[0]), ratio(speeds[0], TOLERANCE * speeds[1])
            ),
            share=1.0 - speeds[1] / speeds[0],
            evidence=(
                say(
                    "{small.throughput} with a pool of {small.pool_tokens}, {large.throughput} "
                    "with {large.pool_tokens}",
                    small=small,
                    large=large,
                ),
            ),
        )


RULE = Rule(
    name="pool_copies",
    cause=Cause.SERIALIZATION,
    needs=(("arms.pool_tokens", "arms.throughput"),),
    find=find,
    fixes=(
        Fix(
            text="a smaller pool (gpu_memory_utilization) until the copy of the whole cache is gone"
        ),
        Fix(text="profile a step: a copy or a scan whose length is the number of blocks"),
    ),
)
