"""Arithmetic that several rules share. Pure.

Which arms compare, how far equal runs differ, what a hit should save.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headstart.doctor.facts import Group, Known

TOLERANCE = 1.5
"""What two figures that are each off by 20 % do to their ratio: 1.2 / 0.8. Figures that people give
are rounded and averaged; nothing is called impossible within this factor."""
MATERIAL = 0.1
"""A cause of less than a tenth of the first token's time is not why it is slow."""
_SAME_SETTING = 1.1
_NOISE = 0.1
"""Of a ratio of two runs of which nothing else is known. The README's own A/A runs differ by up to
16 %, their median by 5 %; a quiet GPU server's by 1 to 3 %."""
_MOST = 100.0
_GOOD = 0.8
_NOTHING = 0.05
_NOISE_MIN = 0.03
_SETTINGS = (
    "concurrency", "ranks", "requests_per_s", "pool_tokens", "block_size", "routing",
    "speculation", "background", "prompt_tokens", "shared_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same load without the cache (or without a hit), and with it."""

    without: Group
    hit: Group

    @property
    def key(self) -> str:
        """What both tell, median or mean; `ttft` where one tells only the other."""
        return common(self.without, self.hit) or "ttft"

    @property
    def times(self) -> tuple[float, float]:
        """TTFT of the first and of the second."""
        return self.without.number(self.key) or 0.0, self.hit.number(self.key) or 0.0

    @property
    def ratio(self) -> float:
        """TTFT of the second by that of the first."""
        before, after = self.times
        return after / (before or math.inf)

    @property
    def gain_s(self) -> float:
        """Seconds by which the hit is sooner; below zero: later."""
        before, after = self.times
        return before - after

    @property
    def noise(self) -> float:
        """See `noise`; a mean and a median differ by themselves."""
        least = TOLERANCE - 1.0 if self.key == "ttft" else 0.0
        return max(least, noise(self.without, self.hit))


def common(one: Group, other: Group) -> str:
    """The key of the TTFT that both tell: median or mean; empty if there is none."""
    keys = ("ttft_p50", "ttft_mean")
    return next((key for key in keys if one.number(key) and other.number(key)), "")


def pairs(known: Known) -> Iterator[Pair]:
    """Arms that differ in what was hit, and in nothing else that is told, both with a TTFT.

    The reference is a run without the cache; only where there is none, one with nothing held, which
    also pays for storing.
    """
    timed = [arm for arm in known.arms if arm.number("ttft")]
    for hit in timed:
        if hit.text("cache") not in ("warm", "on"):
            continue
        for state in ("off", "cold"):
            others = [arm for arm in timed if arm.text("cache") == state and alike(arm, hit)]
            for without in others:
                yield Pair(without=without, hit=hit)
            if others:
                break


def alike(one: Group, other: Group, *, but: str = "") -> bool:
    """Whether two arms have the same settings, as far as both tell; `but` one of them."""
    return not any(differs(one, other, key) for key in _SETTINGS if key != but)


def differs(one: Group, other: Group, key: str) -> bool:
    """Whether both tell a setting, and another one."""
    first, second = one.fact(key), other.fact(key)
    if first is None or second is None:
        return False
    a, b = one.number(key), other.number(key)
    if a is None or b is None or isinstance(first.value, bool):
        return str(first.value).lower() != str(second.value).lower()
    return max(a, b) > _SAME_SETTING * min(a, b)


def noise(*arms: Group) -> float:
    """By how much a ratio of two runs may be off 1 when nothing has changed.

    What was told of equal runs; else 2 standard errors of the means of n requests each, whose times
    vary by half their mean: 2 * 0.5 * sqrt(2 / n).
    """
    spreads = [spread for arm in arms if (spread := arm.number("ttft_spread")) is not None]
    if spreads:
        return max(_NOISE_MIN, *spreads)
    counts = [n for arm in arms if (n := arm.number("num_requests"))]
    return max(_NOISE_MIN, math.sqrt(2 / min(counts))) if counts else _NOISE


def ratio(one: float, other: float) -> float:
    """`one / other`, at most 100: beyond that nothing depends on it."""
    return min(_MOST, one / other) if other > 0.0 else (_MOST if one > 0.0 else 0.0)


def hitting(known: Known) -> tuple[Group, ...]:
    """Arms in which something can be hit; all there is, where no arms are told."""
    return tuple(arm for arm in known.situations if arm.text("cache") in ("warm", "on", ""))


def is_low(share: float | None, bound: float = 0.1) -> bool:
    """Whether a share was told, and is low."""
    return share is not None and share <= bound


def one_loader(tier: Group) -> bool:
    """Whether one worker loads all, and does not keep up."""
    workers = tier.number("workers")
    return workers is not None and workers < TOLERANCE and bool(tier.number("num_timeouts"))


def all_local(arm: Group) -> bool:
    """Whether the device by itself hits what is hit."""
    local, rate = arm.number("local_hit_rate"), hit_share(arm)
    if local and rate and local >= _GOOD * rate:
        return True
    return bool(local) and is_low(arm.number("external_hit_rate"), _NOTHING)


def hits_well(arm: Group) -> bool:
    """Whether it hits four fifths of what the load allows; of everything, where that is unknown."""
    rate, possible = hit_share(arm), arm.number("shareable_share")
    return rate is not None and rate >= _GOOD * (1.0 if possible is None else possible)


def hit_tokens(arm: Group) -> float | None:
    """Tokens of a prompt that an arm did not compute."""
    cached = arm.number("cached_tokens")
    if cached is not None:
        return cached
    told = arm.numbers("hit_rate", "prompt")
    if told is not None:
        return told[0] * told[1]
    shared = arm.number("shared_tokens")
    return (shared or arm.number("prompt")) if arm.text("cache") == "warm" else None


def hit_share(arm: Group) -> float | None:
    """Share of a prompt that an arm did not compute."""
    rate = arm.number("hit_rate")
    if rate is not None:
        return rate
    told = arm.numbers("cached_tokens", "prompt")
    return min(1.0, told[0] / told[1]) if told and told[1] else None


def loaded_tokens(arm: Group) -> float | None:
    """Tokens of a prompt that were brought to the device: those hit that it did not hold itself."""
    told, hit = arm.number("load_tokens"), hit_tokens(arm)
    if told is not None or hit is None:
        return told
    local, rate = arm.number("local_hit_rate"), hit_share(arm)
    return hit if local is None or not rate else hit * max(0.0, 1.0 - local / rate)


def prefill_rate(known: Known) -> float | None:
    """Tokens a second of one prompt that is computed alone.

    As told, else from a prefill time, else from an arm that computes everything: its TTFT may have
    a queue in it, so that is a lower bound of the rate.
    """
    told_rate = known.top.number("prefill_rate")
    if told_rate:
        return told_rate
    rates: list[float] = []
    for arm in known.situations:
        prompt, prefill = arm.number("prompt"), arm.number("prefill")
        if prompt and prefill:
            computed = prompt - (hit_tokens(arm) or 0.0)
            if computed > 0.2 * prompt:
                rates.append(computed / prefill)
    if rates:
        return max(rates)
    for arm in known.arms:
        told = arm.numbers("prompt", "ttft")
        if told and told[1] and arm.text("cache") in ("off", "cold"):
            rates.append(told[0] / told[1])
    return max(rates) if rates else None


def recompute_s(known: Known, arm: Group) -> float | None:
    """What computing the tokens takes that an arm loads (or hits, where that is not told)."""
    rate, tokens = prefill_rate(known), loaded_tokens(arm)
    return tokens / rate if rate and tokens else None


def break_even(known: Known) -> float | None:
    """Bytes a second from which loading is sooner than computing, whatever the length."""
    each, rate = known.situations[0].number("kv_bytes_per_token"), prefill_rate(known)
    return rate * each if rate and each else None


def load_nbytes(arm: Group) -> float | None:
    """Bytes that are loaded for one request."""
    nbytes = arm.number("load_nbytes")
    if nbytes is not None:
        return nbytes
    each = arm.number("kv_bytes_per_token")
    tokens = loaded_tokens(arm)
    return tokens * each if tokens and each else None


def working_set(arm: Group) -> float | None:
    """Tokens that must be held for what comes again to hit."""
    sessions = arm.numbers("sessions", "session_tokens")
    return sessions[0] * sessions[1] if sessions else arm.number("reuse_distance")


def subject(known: Known) -> Group | None:
    """The arm that the question is about: the slowest of those with hits, else the slowest."""
    timed = [arm for arm in known.situations if arm.number("ttft")]
    hot = [arm for arm in timed if arm.text("cache") in ("warm", "on")] or timed
    return max(hot, key=lambda arm: arm.number("ttft") or 0.0, default=None)
