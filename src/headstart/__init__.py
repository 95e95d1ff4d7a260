"""Headstart: a tiered prefix cache for LLM serving.

    from headstart import Settings, open_store

A hit never makes the first token slower and never changes an answer. The names below are the public
library; each is imported when it is first used, so that `import headstart` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstart.config import load_settings, open_store
    from headstart.errors import (
        ClosedError,
        ConfigError,
        HeadstartError,
        RootLockedError,
        TierUnavailableError,
        UnsupportedModelError,
    )
    from headstart.keys import BlockLayout, Namespace, block_keys, keys_from_hashes
    from headstart.lease import Lease, Reservation
    from headstart.settings import Settings
    from headstart.store import Lookup, PrefixStore, StoreStats
    from headstart.types import BlockKey, KeyChain, Outcome, TierStats, VerifyReport

__version__ = "0.1.0"

__all__ = [
    "BlockKey",
    "BlockLayout",
    "ClosedError",
    "ConfigError",
    "HeadstartError",
    "KeyChain",
    "Lease",
    "Lookup",
    "Namespace",
    "Outcome",
    "PrefixStore",
    "Reservation",
    "RootLockedError",
    "Settings",
    "StoreStats",
    "TierStats",
    "TierUnavailableError",
    "UnsupportedModelError",
    "VerifyReport",
    "__version__",
    "block_keys",
    "keys_from_hashes",
    "load_settings",
    "open_store",
]

_NAMES_BY_MODULE = {
    "config": ("load_settings", "open_store"),
    "errors": (
        "ClosedError",
        "ConfigError",
        "HeadstartError",
        "RootLockedError",
        "TierUnavailableError",
        "UnsupportedModelError",
    ),
    "keys": ("BlockLayout", "Namespace", "block_keys", "keys_from_hashes"),
    "lease": ("Lease", "Reservation"),
    "settings": ("Settings",),
    "store": ("Lookup", "PrefixStore", "StoreStats"),
    "types": ("BlockKey", "KeyChain", "Outcome", "TierStats", "VerifyReport"),
}
_HOME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
