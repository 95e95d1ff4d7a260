"""What is asked of the engines. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headstart.errors import ConfigError
from headstart.sizing.architecture import ELEMENT_BITS
from headstart.sizing.contexts import Contexts

_MAX_CONCURRENCY = 10**6
_MAX_OUTPUT_TOKENS = 10**9
_MAX_POOL_TOKENS = 10**18


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Prompts, how many at once, and what is held of them."""

    contexts: Contexts
    concurrency: int
    """Requests under way at once, of each engine."""
    hit_share: float = 1.0
    """Of each prompt's tokens that are held."""
    memory_share: float = 0.0
    """Of the hits that host memory holds whole; the storage is read for the others."""
    output_tokens: int = 256
    tpot_s: float = 0.03
    """Of a step that only decodes."""
    pool_tokens: int = 0
    """To be rebuilt after everything was lost; 0: a thousand mean prompts."""
    kv_dtype: str = ""
    """Empty: the model's."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("concurrency", 1, _MAX_CONCURRENCY),
            ("output_tokens", 1, _MAX_OUTPUT_TOKENS),
            ("pool_tokens", 0, _MAX_POOL_TOKENS),
        ):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; supply a number from {least} to {most:.0e}"
                )
        if not 0.0 < self.hit_share <= 1.0:
            raise ConfigError(f"hit share {self.hit_share:g} must be above 0, up to 1")
        if not 0.0 <= self.memory_share < 1.0:
            raise ConfigError(
                f"memory share {self.memory_share:g} must be at least 0 and below 1: where host "
                "memory holds every hit, there is no storage to size"
            )
        if not 0.0 <= self.tpot_s < math.inf:
            raise ConfigError(f"time per output token {self.tpot_s:g} s must be 0 or more")
        if self.kv_dtype and self.kv_dtype not in ELEMENT_BITS:
            allowed = ", ".join(ELEMENT_BITS)
            raise ConfigError(f"KV dtype {self.kv_dtype!r} is unknown; allowed: {allowed}")
