"""Where the time to the first token goes: queue + look-up + load + prefill + rest. Pure.

    rest = TTFT - (queue + look-up + load + gap + prefill)

A stage that was not measured is computed where it can be: loading as bytes by bandwidth, prefill as
tokens not hit by the prefill rate. A negative rest means that stages overlap, or that the figures
are not of the same requests.

Engines may measure one stage inside another. vLLM's queue time ends when a request first runs and
its prefill time begins there, and the two fill the first token: looking up, and a load that is
awaited before (an asynchronous one), are inside the queue, a load that the forward pass waits for
is inside the prefill. What is in another stage is taken out of that: nothing is added twice.

Stages that are means, as metrics tell them, are parts of the mean time, and not of the median.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headstart.doctor.arms import TOLERANCE, hit_tokens, load_nbytes, prefill_rate
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Split, Stage

SKEW = 3.0
"""By how much a mean may exceed its median with nothing wrong: that of a log-normal with sigma 1.5,
a spread of 20 times between the 2nd and the 98th percentile."""
_LOOKUP = ("hash", "lookup", "embed", "ann")
_NO_HIT = ("off", "cold")
_LOAD = ("prepare", "serialize", "transfer")
_STAGES = ("queue", *_LOOKUP, "load", *_LOAD, "ready_gap", "prefill")


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The time to the first token that an arm's stages are parts of."""

    key: str
    """`ttft_p50` or `ttft_mean`."""
    seconds: float
    slack: float = 1.0
    """What to multiply it by to be sure: stages may be means, and only a median is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inside:
    """Seconds that are in two stages as they were measured."""

    queue: float = 0.0
    """Of the queue: looking up and loading."""
    prefill: float = 0.0
    """Of the prefill: loading."""


def whole(arm: Group) -> Whole | None:
    """Of median and mean the one that goes with the stages; None where neither was told.

    Stages of the file that tells the median are medians, unless it tells the mean alone.
    """
    facts = [fact for key in _STAGES if (fact := arm.fact(key)) is not None]
    paths = {fact.source.path for fact in facts}
    median, mean = arm.fact("ttft_p50"), arm.fact("ttft_mean")
    of_median = median is not None and (not paths or median.source.path in paths)
    of_mean = mean is not None and mean.source.path in paths
    same = median is not None and mean is not None and median.source.path == mean.source.path
    if median is not None and (mean is None or (of_median and (same or not of_mean))):
        slack = 1.0 if of_median else SKEW
        return Whole(key="ttft_p50", seconds=arm.number("ttft_p50") or 0.0, slack=slack)
    seconds = arm.number("ttft_mean")
    return None if seconds is None else Whole(key="ttft_mean", seconds=seconds)


def splits(known: Known) -> Iterator[Split]:
    """One for each arm of which the TTFT and any stage is known."""
    for arm in known.situations:
        split = split_of(known, arm)
        if split is not None:
            yield split


def split_of(known: Known, arm: Group) -> Split | None:
    """None where nothing but the sum is known."""
    ttft = whole(arm)
    stages = list(_stages(known, arm))
    if ttft is None or not ttft.seconds or not stages:
        return None
    total = sum(stage.seconds for stage in stages)
    rest = Stage(name="rest", seconds=ttft.seconds - total, is_measured=False)
    return Split(
        arm=arm.name,
        ttft_s=ttft.seconds,
        stages=(*stages, rest),
        evidence=say(f"the first token takes {{arm.{ttft.key}}}", arm=arm),
    )


def queued_s(known: Known, arm: Group) -> float | None:
    """What an arm queues, without the loads and look-ups that its engine counts as queue."""
    queue = arm.number("queue")
    return None if queue is None else max(0.0, queue - _inside(known, arm).queue)


def _stages(known: Known, arm: Group) -> Iterator[Stage]:
    queued, looked_up = queued_s(known, arm), _sum(arm, _LOOKUP)
    if queued is not None:
        yield Stage(name="queue", seconds=queued, is_measured=True)
    if looked_up is not None:
        yield Stage(name="look-up", seconds=looked_up, is_measured=True)
    load = load_s(known, arm)
    if load is not None:
        yield load
    gap = arm.number("ready_gap")
    if gap is not None:
        yield Stage(name="ready, not run", seconds=gap, is_measured=True)
    prefill = arm.number("prefill")
    if prefill is not None:
        computing = max(0.0, prefill - _inside(known, arm).prefill)
        yield Stage(name="prefill", seconds=computing, is_measured=True)
        return
    prompt, hit, rate = arm.number("prompt"), hit_tokens(arm), prefill_rate(known)
    if prompt is not None and hit is not None and rate and arm.text("cache") not in _NO_HIT:
        left = max(0.0, prompt - hit)
        yield Stage(name="prefill", seconds=left / rate, is_measured=False)


def _inside(known: Known, arm: Group) -> _Inside:
    """As told, else, of vLLM, what makes the stages longer than the whole."""
    queue, prefill = arm.number("queue") or 0.0, arm.number("prefill") or 0.0
    told, ttft, load = arm.number("queue_load"), whole(arm), load_s(known, arm)
    awaited = min(told or 0.0, queue)
    if ttft is None or not known.engine.startswith("vllm"):
        return _Inside(queue=awaited)
    loading, looking = 0.0 if load is None else load.seconds, _sum(arm, _LOOKUP) or 0.0
    if load is not None and not load.is_measured and loading > TOLERANCE * ttft.seconds:
        loading = awaited  # computed for others: see `load_slower`
    parts = queue + looking + loading + (arm.number("ready_gap") or 0.0) + prefill
    over = max(0.0, parts - awaited - ttft.seconds)
    if told is None:
        # LMCache loads in the forward pass unless told otherwise: then no longer than that takes.
        most = loading - prefill if known.connector == "lmcache" else loading
        awaited = min(queue, over, max(0.0, most))
        over -= awaited
    looked_up = min(queue - awaited, over, looking)
    in_prefill = min(prefill, over - looked_up, max(0.0, loading - awaited))
    return _Inside(queue=awaited + looked_up, prefill=in_prefill)


def load_s(known: Known, arm: Group) -> Stage | None:
    """What loading takes in an arm, measured or computed."""
    measured = _sum(arm, ("load",))
    measured = _sum(arm, _LOAD) if measured is None else measured
    if measured is not None:
        return Stage(name="load", seconds=measured, is_measured=True)
    awaited = _sum(arm, ("queue_load",))
    if awaited:
        return Stage(name="load", seconds=awaited, is_measured=False)
    nbytes = load_nbytes(arm)
    rates = [rate for tier in known.tiers if (rate := tier.number("bandwidth"))]
    if nbytes and rates and arm.text("cache") not in _NO_HIT:
        return Stage(name="load", seconds=nbytes / min(rates), is_measured=False)
    return None


def _sum(arm: Group, keys: tuple[str, ...]) -> float | None:
    told = [value for key in keys if (value := _number(arm, key)) is not None]
    return sum(told) if told else None


def _number(arm: Group, key: str) -> float | None:
    """What was told; a run in which nothing can be hit loads only if it says so itself."""
    is_inherited = key not in arm.own
    if is_inherited and key in ("load", "queue_load", *_LOAD) and arm.text("cache") in _NO_HIT:
        return None
    return arm.number(key)
