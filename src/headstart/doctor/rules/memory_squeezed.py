"""Host memory that is slower than it should be.

bytes read again and again > container limit - memory in use: the page cache cannot keep them
host tier / link < 50 %, not pinned: pageable copies go through a bounce buffer
tier / what its path gives < 50 %, several NUMA nodes, not bound: bytes cross to the other socket
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Group, Known, say
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
        yield from _wrong_kind(known, tier)


def _wrong_kind(known: Known, tier: Group) -> Iterator[Sign]:
    """Memory that is pageable, or on the other socket."""
    top, told = known.top, tier.number("bandwidth")
    link = top.number("link_bandwidth") if tier.text("kind") == "memory" else None
    best = link or tier.number("device_bandwidth")
    if not told or not best or told >= _HALF * best:
        return
    gives = "{tier.bandwidth} from {tier.name}, of "
    gives += "a link of {top.link_bandwidth}" if link else "{tier.device_bandwidth}"
    if link and top.says("pinned", False):
        why, strength = "host memory is not pinned", Strength.COMPUTED
    elif (
        tier.text("kind") in ("memory", "network")
        and top.says("numa_bound", False)
        and (top.number("numa_nodes") or 2.0) > 1.0
    ):
        why, strength = "workers and memory are not bound to one NUMA node", Strength.COMPARED
    else:
        return
    yield Sign(
        strength=strength,
        margin=ratio(_HALF * best, told),
        share=1.0 - told / best,
        evidence=(say(f"{gives}: {why}", tier=tier, top=top),),
    )


RULE = Rule(
    name="memory_squeezed",
    cause=Cause.BANDWIDTH_CONTENTION,
    needs=(
        ("tiers.hot", "arms.memory_limit", "arms.memory_used"),
        ("tiers.bandwidth", "arms.link_bandwidth", "arms.pinned"),
        ("tiers.bandwidth", "tiers.device_bandwidth", "arms.numa_bound"),
    ),
    find=find,
    fixes=(
        Fix(text="raise the container's limit by what is read again, or read with O_DIRECT"),
        Fix(engine="sglang", text="--hicache-numa-detect, --numa-node"),
        Fix(text="numactl --cpunodebind --membind: worker, its pool, device and NIC on one node"),
        Fix(text="pin the host pool (cudaHostRegister), in pieces, at start"),
        Fix(text="ulimit -l unlimited for the process that pins"),
    ),
)
