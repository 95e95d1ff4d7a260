"""A transfer that is as fast as one CPU core: bandwidth < half of the device, one core busy.

A device that waits for requests leaves its core idle; a core at 100 % is packing or copying.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_HALF = 0.5
_BUSY = (0.7, 1.6)


def find(known: Known) -> Iterator[Sign]:
    """Tiers that wait for one core."""
    for tier in known.tiers:
        told = tier.numbers("bandwidth", "device_bandwidth", "busy_cores")
        if told is None or told[0] >= _HALF * told[1] or not _BUSY[0] <= told[2] <= _BUSY[1]:
            continue
        yield Sign(
            strength=Strength.COMPUTED,
            margin=min(ratio(_HALF * told[1], told[0]), ratio(told[2], _BUSY[0])),
            share=1.0 - told[0] / told[1],
            evidence=(
                say(
                    "{tier.bandwidth} of {tier.device_bandwidth}, with {tier.busy_cores} core busy",
                    tier=tier,
                ),
            ),
        )


RULE = Rule(
    name="one_core",
    cause=Cause.SERIALIZATION,
    needs=(("tiers.bandwidth", "tiers.device_bandwidth", "tiers.busy_cores"),),
    find=find,
    fixes=(
        Fix(text="several processes, or native code that drops the GIL, for packing"),
        Fix(text="raw bytes instead of a serialiser"),
    ),
)
