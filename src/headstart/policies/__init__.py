"""Eviction policies by name."""

from __future__ import annotations

import time
from collections.abc import Callable

from headstart.errors import ConfigError
from headstart.policies.base import Blocks, EvictionPolicy, Expiring, Sectioned, Watching
from headstart.policies.cost import CostPolicy
from headstart.policies.fifo import FifoPolicy
from headstart.policies.lfu_da import LfuDaPolicy
from headstart.policies.lru import LruPolicy
from headstart.policies.queue import LeafQueue
from headstart.policies.s3fifo import S3FifoPolicy
from headstart.policies.sections import Leaves, SectionedQueue, leaf_queue
from headstart.policies.tlru import TlruPolicy
from headstart.policies.ttl import TTL_S, TtlPolicy
from headstart.units import parse_seconds

__all__ = [
    "POLICIES",
    "Blocks",
    "CostPolicy",
    "EvictionPolicy",
    "Expiring",
    "FifoPolicy",
    "LeafQueue",
    "Leaves",
    "LfuDaPolicy",
    "LruPolicy",
    "S3FifoPolicy",
    "Sectioned",
    "SectionedQueue",
    "TlruPolicy",
    "TtlPolicy",
    "Watching",
    "leaf_queue",
    "make_policy",
]

POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LruPolicy,
    "fifo": FifoPolicy,
    "lfu-da": LfuDaPolicy,
    "s3fifo": S3FifoPolicy,
    "ttl": TtlPolicy,
    "tlru": TlruPolicy,
    "cost": CostPolicy,
}


def make_policy(text: str, *, clock: Callable[[], float] = time.monotonic) -> EvictionPolicy:
    """A fresh policy: a name, or a name with its one number, such as `"ttl=10min"`.

    `clock` is in seconds, for policies that go by time. Raises ConfigError for what is unknown.
    """
    name, has_number, number = str(text).partition("=")
    if name not in POLICIES:
        raise ConfigError(f"eviction policy {text!r} is unknown; allowed: {', '.join(POLICIES)}")
    if name == "ttl":
        return TtlPolicy(parse_seconds(number) if has_number else TTL_S, clock=clock)
    if not has_number:
        return POLICIES[name]()
    if name == "tlru":
        return TlruPolicy(_tokens(text, number))
    if name == "cost":
        return CostPolicy(_tokens(text, number))
    raise ConfigError(
        f"eviction policy {text!r}: {name} has nothing to set; allowed are numbers for "
        'ttl ("ttl=10min"), tlru ("tlru=1024", tokens) and cost ("cost=32768", tokens)'
    )


def _tokens(text: str, number: str) -> int:
    if not number.isdecimal() or not number.isascii():
        raise ConfigError(f"eviction policy {text!r}: {number!r} is not a number of tokens")
    return int(number)
