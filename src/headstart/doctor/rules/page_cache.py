"""A "disk" that the page cache answers for.

    bytes the device gave < half of the bytes the cache read (or wrote)
    bandwidth of loads > what the device gives at best

By half, most of the bytes came from memory, and the next start will be another one.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_HALF = 0.5


def find(known: Known) -> Iterator[Sign]:
    """A tier on disk whose device did not do the work."""
    for tier in known.tiers:
        if tier.text("kind") in ("memory", "network"):
            continue
        by_cache = max(tier.number("read") or 0.0, tier.number("written") or 0.0)
        key = "read" if by_cache == tier.number("read") else "written"
        device = tier.number("device_read")
        if by_cache and device is not None and device < _HALF * by_cache:
            yield Sign(
                strength=Strength.SEEN,
                margin=ratio(_HALF * by_cache, device),
                evidence=(
                    say(
                        f"the cache counts {{tier.{key}}}, the device {{tier.device_read}}: the "
                        "rest came from the page cache",
                        tier=tier,
                    ),
                ),
            )
        told = tier.numbers("bandwidth", "device_bandwidth")
        if told is not None and told[0] > TOLERANCE * told[1]:
            yield Sign(
                strength=Strength.COMPUTED,
                margin=ratio(told[0], TOLERANCE * told[1]),
                evidence=(
                    say(
                        "{tier.bandwidth} from a medium that gives {tier.device_bandwidth} at best",
                        tier=tier,
                    ),
                ),
            )


RULE = Rule(
    name="page_cache",
    cause=Cause.MEASUREMENT,
    needs=(("tiers.read", "tiers.device_read"), ("tiers.bandwidth", "tiers.device_bandwidth")),
    find=find,
    fixes=(
        Fix(text="drop the page cache between the arms (posix_fadvise DONTNEED), or use O_DIRECT"),
        Fix(text="read more than the machine has memory"),
        Fix(
            engine="lmcache",
            text="extra_config use_odirect: true, and check with iostat that the device reads",
        ),
    ),
)
