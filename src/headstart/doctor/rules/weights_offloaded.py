"""Weights are kept in host memory although they fit the device: each step moves them over the link.

    weights < 90 % of device memory, and a flag that offloads some

At 90 % little is left for KV, and offloading may be meant.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.units import format_seconds

_FITS = 0.9


def find(known: Known) -> Iterator[Sign]:
    """Arms with a stale flag."""
    for arm in known.situations:
        told = arm.numbers("weights", "device_memory")
        if not arm.number("weights_offloaded") or told is None or told[0] > _FITS * told[1]:
            continue
        link = arm.number("link_bandwidth")
        each = (arm.number("weights_offloaded") or 0.0) / link if link else None
        yield Sign(
            strength=Strength.SEEN,
            margin=ratio(_FITS * told[1], told[0]),
            share=1.0,
            evidence=(
                say(
                    "{arm.weights_offloaded} of weights in host memory, while all {arm.weights} "
                    "fit the {arm.device_memory} of the device"
                    + (f": {format_seconds(each)} a step" if each else ""),
                    arm=arm,
                ),
            ),
        )
        return


RULE = Rule(
    name="weights_offloaded",
    cause=Cause.CONFIGURATION,
    needs=(("arms.weights_offloaded", "arms.weights", "arms.device_memory"),),
    find=find,
    fixes=(
        Fix(engine="vllm", text="remove --cpu-offload-gb"),
        Fix(engine="sglang", text="remove --cpu-offload-gb"),
        Fix(engine="llama.cpp", text="raise --n-gpu-layers"),
    ),
)
