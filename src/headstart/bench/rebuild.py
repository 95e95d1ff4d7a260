"""Cold-rebuild time: how long after a restart a server is as good as it was before.

A request is compared with itself in the steady phase, since prompts of a load differ: those of the
first turns are short, and a short prompt's first token is no sign of a warm cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from headstart.bench.run import Rebuild, Request

HIT_SHARE = 0.9
TTFT_FACTOR = 1.1
_WINDOW = 20
_LEAST_WINDOWS = 4

_Pair = tuple[Request, Request]


def rebuild_times(restarted: Sequence[Request], steady: Sequence[Request]) -> Rebuild:
    """Seconds from a load's start until windows of its requests are as they were.

    The requests of both runs are the answers to the same load, in its order. A window slides over
    those of the restart in the order of their first tokens, full from the first on; a request that
    failed in `steady` is left out, one that failed after the restart is a miss without end.
    """
    pairs = [(one, other) for one, other in zip(restarted, steady, strict=True) if other.is_good]
    pairs.sort(key=lambda pair: _known_at(pair[0]))
    window = max(1, min(_WINDOW, len(pairs) // _LEAST_WINDOWS))
    return Rebuild(
        window=window,
        hit_rate_s=_first(pairs, window, _hits_are_back),
        ttft_s=_first(pairs, window, _first_tokens_are_back),
    )


def _first(
    pairs: Sequence[_Pair], window: int, holds: Callable[[Sequence[_Pair]], bool]
) -> float | None:
    """When the first window is complete that `holds`."""
    for end in range(window, len(pairs) + 1):
        if holds(pairs[end - window : end]):
            return _known_at(pairs[end - 1][0])
    return None


def _hits_are_back(window: Sequence[_Pair]) -> bool:
    """Of prompt tokens: 90 % of what was hit. Where nothing was hit, nothing can come back."""
    if any(each.is_good and each.cached_tokens is None for pair in window for each in pair):
        return False
    before = sum(other.cached_tokens or 0 for _, other in window)
    now = sum(one.cached_tokens or 0 for one, _ in window if one.is_good)
    return before > 0 and now >= HIT_SHARE * before


def _first_tokens_are_back(window: Sequence[_Pair]) -> bool:
    """The median within 10 % of what it was."""
    before = median(other.ttft_s or math.inf for _, other in window)
    now = median((one.ttft_s or math.inf) if one.is_good else math.inf for one, _ in window)
    return now <= TTFT_FACTOR * before


def _known_at(request: Request) -> float:
    """When a request's first token came, or when it was sent if none came."""
    intended_s = request.intended_s or 0.0
    if request.is_good:
        return intended_s + (request.ttft_s or 0.0)
    return intended_s if request.sent_s is None else request.sent_s
