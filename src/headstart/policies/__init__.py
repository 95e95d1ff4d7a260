"""Eviction policies by name."""

from __future__ import annotations

from headstart.errors import ConfigError
from headstart.policies.base import EvictionPolicy
from headstart.policies.fifo import FifoPolicy
from headstart.policies.lru import LruPolicy
from headstart.policies.queue import LeafQueue

__all__ = ["POLICIES", "EvictionPolicy", "FifoPolicy", "LeafQueue", "LruPolicy", "make_policy"]

POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LruPolicy, "fifo": FifoPolicy}


def make_policy(name: str) -> EvictionPolicy:
    """A fresh policy. Raises ConfigError for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(f"eviction policy {name!r} is unknown; allowed: {', '.join(POLICIES)}")
    return POLICIES[name]()
