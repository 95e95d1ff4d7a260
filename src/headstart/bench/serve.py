"""A load and a run of it: what is asked of a server, and what came of it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headstart.bench.drive import Advance, Pace, Target
from headstart.bench.load import Ask, Shape, fingerprint, hit_rate, salted
from headstart.bench.processes import send
from headstart.bench.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked, and how."""

    workload: str
    shape: Shape
    pace: Pace
    asks: list[Ask]
    """Without salts."""
    block_size: int
    """The server's, for the hit rate that is possible."""
    told: Mapping[str, float | None] = field(default_factory=dict)
    """What a run says of its pace beside what `pace` does."""


def warm_up(load: Load, target: Target, num_requests: int) -> None:
    """Let a server compile and allocate, with prompts that nobody asks again."""
    at_once = [replace(ask, think_s=0.0) for ask in load.asks[:num_requests]]
    if at_once:
        send(salted(at_once, secrets.token_hex(8), load.shape), target, Pace(concurrency=1))


def measure(load: Load, target: Target, salt: str, advance: Advance) -> Run:
    """Send the load once. `advance` hears how many requests are done.

    Raises ConfigError where the server cannot be reached at all, HeadstartError where a client
    dies.
    """
    asked = salted(load.asks, salt, load.shape)
    requests, seconds = send(asked, target, load.pace, advance)
    return Run(
        tool="headstart",
        duration_s=seconds,
        requests=tuple(requests),
        pace={**load.pace.told(), **load.told, "think_s": load.shape.think_s},
        block_size=load.block_size,
        prompts=fingerprint(load.asks),
        simulated_hit_rate=hit_rate(asked, load.block_size),
        workload=load.workload,
        salt=salt,
    )
