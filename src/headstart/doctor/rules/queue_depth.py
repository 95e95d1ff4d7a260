"""One request at a time to a device that needs many.

    depth = device latency / interval between requests < 1, or one reader
    bandwidth ~ what the device gives at depth 1, and < a third of what it gives at best

An NVMe drive gives a tenth of its bandwidth at depth 1 (64 KiB: 0.5 of 3.9 GB/s; of a RAID 4 of
45). A link has no depth of its own, so of a tier of memory it is only said where depth was told;
where nothing was, bandwidth that is missing says where the time goes, and not why.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.doctor.quantities import show_bytes_per_s

_THIRD = 1.0 / 3.0
_DEPTH1 = 2.0


def find(known: Known) -> Iterator[Sign]:
    """Tiers that wait for one request at a time."""
    for tier in known.tiers:
        if (tier.number("busy_cores") or 0.0) > 0.7:
            continue  # a busy core, not the device, is waited for
        best = tier.number("device_bandwidth") or _best(known)
        bandwidth = tier.number("bandwidth")
        if best is None or bandwidth is None or bandwidth >= _THIRD * best:
            continue
        single = tier.number("depth1_bandwidth") or _single(known)
        depth = tier.numbers("latency", "submit_interval")
        if single is not None and bandwidth < _DEPTH1 * single:
            why, strength = "{single} at depth 1", Strength.COMPUTED
        elif depth is not None and ratio(*depth) < 1.0:
            why = "a request of {tier.latency} every {tier.submit_interval}"
            strength = Strength.COMPUTED
        elif (tier.number("workers") or 9.0) < TOLERANCE:
            why, strength = "{tier.workers} reader", Strength.COMPUTED
        elif (
            single is None
            and depth is None
            and tier.number("workers") is None
            and tier.text("kind") != "memory"
        ):
            why, strength = "nothing is told of its depth", Strength.HINTED
        else:
            continue
        yield Sign(
            strength=strength,
            margin=min(ratio(_THIRD * best, bandwidth), ratio(_DEPTH1 * single, bandwidth))
            if single and strength is Strength.COMPUTED
            else ratio(_THIRD * best, bandwidth),
            share=1.0 - bandwidth / best,
            is_symptom=strength is Strength.HINTED,
            evidence=(
                say(
                    "{tier.name} gives {tier.bandwidth} of {best}: " + why,
                    tier=tier,
                    best=show_bytes_per_s(best),
                    single=show_bytes_per_s(single or 0.0),
                ),
            ),
        )


def _best(known: Known) -> float | None:
    """The best of a sweep of depths."""
    return max((told[0] for told in _sweep(known)), default=None)


def _single(known: Known) -> float | None:
    return next((told[0] for told in _sweep(known) if told[1] == 1.0), None)


def _sweep(known: Known) -> list[tuple[float, float]]:
    points = [told for read in known.reads if (told := read.numbers("bandwidth", "depth"))]
    return [(told[0], told[1]) for told in points]


RULE = Rule(
    name="queue_depth",
    cause=Cause.IO_PARALLELISM,
    needs=(("tiers.bandwidth", "tiers.device_bandwidth", "tiers.depth1_bandwidth"),),
    find=find,
    fixes=(
        Fix(text="read in batches: io_uring, or threads with direct reads, at a depth of 16 to 64"),
        Fix(
            text="explicit reads instead of mmap: each page fault is a read of its own, at depth 1"
        ),
        Fix(engine="lmcache", text="parallel reads (several disk workers), a larger chunk_size"),
        Fix(engine="sglang", text="prefetch_io_workers and numjobs of the storage backend"),
        Fix(text="`headstart bench storage` finds the depth that the device needs"),
    ),
)
