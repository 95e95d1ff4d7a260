"""Distributions of context lengths: `32768`, `8k:0.7,32k:0.3` or `p50=8k,p99=64k`. Pure."""

from __future__ import annotations

import math
from statistics import NormalDist

from headstart.errors import ConfigError

Contexts = tuple[tuple[int, float], ...]
"""Tokens and share of the prompts; shares add up to 1."""

_EXAMPLES = "32768, 8k:0.7,32k:0.3 or p50=8k,p99=64k"
_NUM_QUANTILES = 40
_MAX_TOKENS = 1e12


def parse_contexts(text: str) -> Contexts:
    """The distribution that a text describes. Raises ConfigError.

    `k` is 1,024 tokens. With p50 and p99 the lengths are log-normal, as prompts in traces nearly
    are, in 40 steps of equal share.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"context {text!r} is empty; write {_EXAMPLES}")
    if all("=" in part for part in parts):
        return _log_normal(text, parts)
    pairs = [part.partition(":") for part in parts]
    found = [
        (_tokens(text, tokens), _share(text, share.strip()) if colon else 1.0)
        for tokens, colon, share in pairs
    ]
    total = sum(share for _, share in found)
    if not math.isfinite(total):
        raise ConfigError(f"context {text!r}: shares beyond all bounds; write {_EXAMPLES}")
    return tuple(sorted((tokens, share / total) for tokens, share in found))


def mean_tokens(contexts: Contexts) -> float:
    """Of a prompt."""
    return sum(tokens * share for tokens, share in contexts)


def _log_normal(text: str, parts: list[str]) -> Contexts:
    given = {
        name.strip(): _tokens(text, value) for name, _, value in (p.partition("=") for p in parts)
    }
    if len(parts) != 2 or set(given) != {"p50", "p99"} or given["p99"] <= given["p50"]:
        raise ConfigError(f"context {text!r}: write p50 and a larger p99, such as p50=8k,p99=64k")
    normal = NormalDist()
    spread = math.log(given["p99"] / given["p50"]) / normal.inv_cdf(0.99)
    ranks = [(step + 0.5) / _NUM_QUANTILES for step in range(_NUM_QUANTILES)]
    lengths = [round(given["p50"] * math.exp(spread * normal.inv_cdf(rank))) for rank in ranks]
    return tuple((max(1, length), 1.0 / _NUM_QUANTILES) for length in lengths)


def _tokens(text: str, word: str) -> int:
    word = word.strip().lower()
    try:
        value = float(word.removesuffix("k")) * (1024 if word.endswith("k") else 1)
    except ValueError:
        value = math.nan
    if not 1 <= value <= _MAX_TOKENS:
        raise ConfigError(f"context {text!r}: {word!r} is no number of tokens; write {_EXAMPLES}")
    return round(value)


def _share(text: str, word: str) -> float:
    try:
        value = float(word.removesuffix("%")) / (100.0 if word.endswith("%") else 1.0)
    except ValueError:
        value = math.nan
    if not value > 0 or not math.isfinite(value):
        raise ConfigError(f"context {text!r}: {word!r} is no share; write {_EXAMPLES}")
    return value
