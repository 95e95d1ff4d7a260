"""Media that hold blocks, one module each, all behind `Tier`."""

from __future__ import annotations

from headstart.tiers.base import Batch, Tier, read, run_inline, write
from headstart.tiers.file import FileTier, FileTierOptions
from headstart.tiers.memory import MemoryTier

__all__ = [
    "Batch",
    "FileTier",
    "FileTierOptions",
    "MemoryTier",
    "Tier",
    "read",
    "run_inline",
    "write",
]
