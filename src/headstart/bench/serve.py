"""A load and its runs: what is asked of every server, whoever started it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from headstart.bench.drive import Advance, Pace, Target
from headstart.bench.load import Ask, Shape, fingerprint, hit_rate, salted, theoretical_hits
from headstart.bench.processes import send
from headstart.bench.run import Run
from headstart.errors import ConfigError

_WARM = Pace(concurrency=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked, and how."""

    workload: str
    shape: Shape
    pace: Pace
    asks: tuple[Ask, ...]
    """Without salts."""
    block_size: int
    """The servers', for the hit rate that is possible."""
    num_warm_up: int = 0
    """Requests to a new server, that are not counted."""
    told: Mapping[str, float | None] = field(default_factory=dict)
    """Of the trace that it is from, for the runs."""


def check_installed() -> None:
    """Find out whether a load can be sent: before servers are started. Raises ConfigError."""
    try:
        import aiohttp  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("a load needs aiohttp: pip install 'headstart[bench]'") from error


def warm_up(load: Load, target: Target, *, at_least: int = 0) -> None:
    """Let a server compile and allocate, with prompts that nobody asks again."""
    asks = load.asks[: max(load.num_warm_up, at_least)]
    if asks:
        at_once = [replace(ask, think_s=0.0) for ask in asks]
        send(salted(at_once, secrets.token_hex(8), load.shape), target, _WARM)


def measure(
    load: Load, target: Target, salt: str, advance: Advance, *, is_again: bool = False
) -> Run:
    """Send the load once. `advance` hears how many requests are done.

    `is_again`: it was sent before with this salt, so that more of it may be hit. Raises ConfigError
    where the server cannot be reached at all.
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
        simulated_hit_rate=_possible(asked, load.block_size, is_again=is_again),
        workload=load.workload,
        salt=salt,
    )


def _possible(asked: Sequence[Ask], block_size: int, *, is_again: bool) -> float:
    """The hit rate of a cache without limit."""
    if not is_again:
        return hit_rate(asked, block_size)
    hits = theoretical_hits([*asked, *asked], block_size)[len(asked) :]
    return sum(hits) / sum(len(ask.tokens) for ask in asked)
