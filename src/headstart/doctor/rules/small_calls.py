"""Copies so small that starting them is what takes the time.

    t(n) = t0 + n / B        efficiency = n / (n + t0 * B)        80 % from n = 4 * t0 * B

t0 and B are fitted to the smallest and the largest call of a sweep at one depth; with one call's
time alone, B is what the link or device gives, or 10 GB/s (PCIe 3 x16 gives 12). Below a half.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.doctor.quantities import show_bytes_per_s, show_share
from headstart.units import format_nbytes, format_seconds

_HALF = 0.5
_LINK = 1e10


def find(known: Known) -> Iterator[Sign]:
    """Tiers whose calls are below half of the bandwidth."""
    for tier in known.tiers:
        call = tier.number("call")
        fit = _from_sweep(known) or _from_call(known, tier)
        if not call or fit is None:
            continue
        start_s, bandwidth = fit
        efficiency = call / (call + start_s * bandwidth)
        if efficiency >= _HALF:
            continue
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(start_s * bandwidth, call),
            share=1.0 - efficiency,
            evidence=(
                say(
                    "calls of {tier.call} reach {efficiency} of {bandwidth}: starting one takes "
                    "{start}",
                    tier=tier,
                    efficiency=show_share(efficiency),
                    bandwidth=show_bytes_per_s(bandwidth),
                    start=format_seconds(start_s),
                ),
            ),
            fixes=(
                Fix(
                    text=f"calls of at least {format_nbytes(round(4 * start_s * bandwidth))} reach "
                    "80 %: merge neighbours, or larger blocks"
                ),
            ),
        )


def _from_sweep(known: Known) -> tuple[float, float] | None:
    """(t0, B) of the sweep's ends, if its calls differ by more than 4 times at one depth."""
    points = sorted(
        told
        for read in known.reads
        if (told := read.numbers("call", "bandwidth")) and (read.number("depth") or 1.0) == 1.0
    )
    if len(points) < 2 or points[-1][0] < 4.0 * points[0][0]:
        return None
    (small, slow), (large, fast) = points[0], points[-1]
    per_byte = (large / fast - small / slow) / (large - small)
    start_s = small / slow - small * per_byte
    return (start_s, 1.0 / per_byte) if per_byte > 0.0 and start_s > 0.0 else None


def _from_call(known: Known, tier: Group) -> tuple[float, float] | None:
    told = tier.numbers("call", "call_time")
    link = tier.number("device_bandwidth") or known.top.number("link_bandwidth") or _LINK
    if told is None:
        return None
    start_s = told[1] - told[0] / link
    return (start_s, link) if start_s > 0.0 else None


RULE = Rule(
    name="small_calls",
    cause=Cause.BLOCK_SIZE,
    needs=(("tiers.call", "tiers.call_time"), ("tiers.call", "reads.call", "reads.bandwidth")),
    find=find,
    fixes=(
        Fix(engine="vllm", text="a larger --block-size, or blocks_per_chunk of the connector"),
        Fix(engine="sglang", text="--hicache-mem-layout page_first, --hicache-io-backend kernel"),
        Fix(text="copy runs of neighbours with one call (cudaMemcpyBatchAsync)"),
    ),
)
