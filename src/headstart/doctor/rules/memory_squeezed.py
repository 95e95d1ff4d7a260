"""Host memory that is slower than it should be.

bytes read again and again > container limit - memory in use: the page cache cannot keep them
host tier / link < 50 %, not pinned: pageable copies go through a bounce buffer
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.units import format_nbytes

_HALF = 0.5


def find(known: Known) -> Iterator[Sign]:
    """Tiers that lack memory, or the right kind."""
    for tier in known.tiers:
        limits = known.top.numbers("memory_limit", "memory_used")
        hot = tier.number("hot")
        if limits is not None and hot and hot > limits[0] - limits[1]:
            read = tier.number("device_read")
            if read != 0.0:
                yield Sign(
                    strength=Strength.COMPUTED if read else Strength.COMPARED,
                    margin=ratio(hot, max(1.0, limits[0] - limits[1])),
                    evidence=(
                        say(
                            "{tier.hot} are read again and again; the container leaves {left} of "
                            "{top.memory_limit} for the page cache"
                            + ("; the device still reads {tier.device_read}" if read else ""),
                            tier=tier,
                            top=known.top,
                            left=format_nbytes(max(0, round(limits[0] - limits[1]))),
                        ),
                    ),
                )
        told, link = tier.number("bandwidth"), known.top.number("link_bandwidth")
        if (
            tier.text("kind") == "memory"
            and known.top.says("pinned", False)
            and told
            and link
            and told < _HALF * link
        ):
            yield Sign(
                strength=Strength.COMPUTED,
                margin=ratio(_HALF * link, told),
                share=1.0 - told / link,
                evidence=(
                    say(
                        "{tier.bandwidth} from host memory that is not pinned, over a link of "
                        "{top.link_bandwidth}",
                        tier=tier,
                        top=known.top,
                    ),
                ),
            )


RULE = Rule(
    name="memory_squeezed",
    cause=Cause.BANDWIDTH_CONTENTION,
    needs=(
        ("tiers.hot", "arms.memory_limit", "arms.memory_used"),
        ("tiers.bandwidth", "arms.link_bandwidth", "arms.pinned"),
    ),
    find=find,
    fixes=(
        Fix(text="raise the container's limit by what is read again, or read with O_DIRECT"),
        Fix(text="pin the host pool (cudaHostRegister), in pieces, at start"),
        Fix(text="ulimit -l unlimited for the process that pins"),
    ),
)
