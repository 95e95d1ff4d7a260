"""TTFT of clients that share one device, by an event simulation. Pure, and the same every time.

Each client of each engine sends a request, waits for its answer, and sends the next. A request
loads its hit (the device is shared equally by all loads under way), then its engine computes the
rest, one request after the other, then decodes. All begin at once: the first wave is the cold start
after a restart.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headstart.errors import ConfigError

_WAVES = 30
_MAX_REQUESTS = 6000
_MAX_CLIENTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one kind of request asks for."""

    share: float
    """Of the requests."""
    load_nbytes: int
    fixed_s: float
    """Before its first byte."""
    compute_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What came of it."""

    p50_s: float
    p99_s: float
    burst_p50_s: float
    """Of the first wave, all at once."""
    burst_worst_s: float
    requests_per_s: float
    """Of all engines, after the first wave."""


def simulate(
    works: Sequence[Work],
    *,
    clients: int,
    engines: int = 1,
    bytes_per_s: float,
    seed: int = 0,
) -> Times:
    """TTFT of `clients` a engine that ask for these works at random."""
    total = clients * engines
    if not 0 < total <= _MAX_CLIENTS:
        raise ConfigError(
            f"{clients} clients x {engines} engines: between 1 and {_MAX_CLIENTS} can be simulated"
        )
    num = max(2 * total, min(_MAX_REQUESTS, _WAVES * total))
    rng = np.random.default_rng(seed)
    shares = np.array([work.share for work in works])
    drawn = [works[int(i)] for i in rng.choice(len(works), size=num, p=shares / shares.sum())]
    asked, first = _run(drawn, total, engines, bytes_per_s)
    ttft = np.array([first[i] - asked[i] for i in range(num)])
    wave, later = ttft[:total], ttft[total:]
    starts = sorted(asked.values())[total:]
    span = max(first[i] for i in range(total, num)) - starts[0]
    return Times(
        p50_s=float(np.quantile(later, 0.5)),
        p99_s=float(np.quantile(later, 0.99)),
        burst_p50_s=float(np.quantile(wave, 0.5)),
        burst_worst_s=float(wave.max()),
        requests_per_s=len(later) / span if span > 0 else 0.0,
    )


def _run(
    drawn: Sequence[Work], total: int, engines: int, bytes_per_s: float
) -> tuple[dict[int, float], dict[int, float]]:
    """When each request was asked, and when its first token came."""
    asked: dict[int, float] = {}
    first: dict[int, float] = {}
    engine_of: dict[int, int] = {}
    free_at = [0.0] * engines
    events: list[tuple[float, int, str]] = []
    loading: list[tuple[float, int]] = []  # service received so far when done, by equal shares
    now = served = 0.0
    waiting = iter(range(len(drawn)))

    def ask(at: float, engine: int) -> None:
        request = next(waiting, None)
        if request is not None:
            asked[request], engine_of[request] = at, engine
            heapq.heappush(events, (at + drawn[request].fixed_s, request, "load"))

    def computed(at: float, request: int) -> None:
        engine, work = engine_of[request], drawn[request]
        free_at[engine] = max(at, free_at[engine]) + work.compute_s
        first[request] = free_at[engine]
        heapq.heappush(events, (first[request] + work.decode_s, request, "answered"))

    for client in range(total):
        ask(0.0, client % engines)
    while events or loading:
        rate = bytes_per_s / len(loading) if loading else 0.0
        done_at = now + (loading[0][0] - served) / rate if loading else float("inf")
        if loading and (not events or done_at <= events[0][0]):
            served, request = heapq.heappop(loading)
            now = done_at
            computed(now, request)
            continue
        at, request, what = heapq.heappop(events)
        served += (at - now) * rate
        now = at
        if what == "answered":
            ask(now, engine_of[request])
        elif drawn[request].load_nbytes:
            heapq.heappush(loading, (served + drawn[request].load_nbytes, request))
        else:
            computed(now, request)
    return asked, first
