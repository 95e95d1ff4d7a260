"""What a trace is like: sizes, times, and what a cache that forgets nothing would hit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.tuner.curve import last_use
from headstart.tuner.recorded import Ints, Recorded

INFO_SCHEMA = "headstart.trace.info/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Infinite:
    """Hits of a cache without limit."""

    block_cold: float
    tokens_cold: float
    tokens_last_half: float


def half(recorded: Recorded) -> int:
    """The request at which the last half begins."""
    return len(recorded) // 2


def infinite(recorded: Recorded) -> Infinite:
    """The most that any cache of whole blocks can hit, for all and for the last half."""
    is_hit = last_use(recorded.blocks) >= 0
    cold, late = (_share(recorded, is_hit, first) for first in (0, half(recorded)))
    return Infinite(
        block_cold=float(is_hit.sum()) / max(1, len(is_hit)),
        tokens_cold=cold,
        tokens_last_half=late,
    )


def _share(recorded: Recorded, is_hit: npt.NDArray[np.bool_], first: int) -> float:
    start = recorded.starts[first]
    hits = recorded.tokens()[start:][is_hit[start:]].sum(dtype=np.int64)
    return float(hits) / max(1.0, float(recorded.input_tokens[first:].sum()))


def info(recorded: Recorded) -> dict[str, Any]:
    """All that `headstart trace info` tells."""
    before = last_use(recorded.blocks)
    is_again = before >= 0
    request = np.repeat(np.arange(len(recorded)), recorded.lengths)
    waits = recorded.at_s[request[is_again]] - recorded.at_s[request[before[is_again]]]
    num_uses = np.bincount(recorded.blocks, minlength=1)
    return {
        "kind": str(recorded.kind),
        "requests": len(recorded),
        "sessions": len(np.unique(recorded.session)),
        "sessions_told": recorded.has_sessions,
        "times_told": recorded.has_times,
        "span_s": float(recorded.at_s[-1] - recorded.at_s[0]),
        "input_tokens": int(recorded.input_tokens.sum()),
        "input_tokens_quantiles": _quantiles(recorded.input_tokens),
        "output_tokens": int(recorded.output_tokens.sum()),
        "output_tokens_quantiles": _quantiles(recorded.output_tokens),
        "block_size": recorded.block_size,
        "blocks": len(recorded.blocks),
        "unique_blocks": int((num_uses > 0).sum()),
        "unique_tokens": int(recorded.tokens()[~is_again].sum(dtype=np.int64)),
        "used_once": float((num_uses == 1).sum()) / max(1, int((num_uses > 0).sum())),
        "infinite_hit": infinite_document(infinite(recorded)),
        "requests_with_hit": _requests_with_hit(recorded, is_again),
        "reuse_s_quantiles": _quantiles(waits) if len(waits) else None,
        "unchained_ids": recorded.num_unchained,
    }


def infinite_document(found: Infinite) -> dict[str, float]:
    """As JSON has it."""
    return {
        "tokens_cold": found.tokens_cold,
        "tokens_last_half": found.tokens_last_half,
        "blocks_cold": found.block_cold,
    }


def _requests_with_hit(recorded: Recorded, is_again: npt.NDArray[np.bool_]) -> float:
    first = recorded.starts[:-1][recorded.lengths > 0]
    return float(is_again[first].sum()) / len(recorded)


def _quantiles(values: Ints | npt.NDArray[np.float64]) -> dict[str, float]:
    shares = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: float(np.quantile(values, share)) for name, share in shares.items()}
