"""Where the time to the first token goes: queue + look-up + load + prefill + rest. Pure.

    rest = TTFT - (queue + look-up + load + gap + prefill)

A stage that was not measured is computed where it can be: loading as bytes by bandwidth, prefill as
tokens not hit by the prefill rate. A negative rest means that stages overlap, or that the figures
are not of the same requests.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import hit_tokens, load_nbytes, prefill_rate
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Split, Stage

_LOOKUP = ("hash", "lookup", "embed", "ann")
_NO_HIT = ("off", "cold")
_LOAD = ("prepare", "serialize", "transfer")


def splits(known: Known) -> Iterator[Split]:
    """One for each arm of which the TTFT and any stage is known."""
    for arm in known.situations:
        split = split_of(known, arm)
        if split is not None:
            yield split


def split_of(known: Known, arm: Group) -> Split | None:
    """None where nothing but the sum is known."""
    ttft = arm.number("ttft")
    stages = list(_stages(known, arm))
    if not ttft or not stages:
        return None
    total = sum(stage.seconds for stage in stages)
    rest = Stage(name="rest", seconds=ttft - total, is_measured=False)
    return Split(
        arm=arm.name,
        ttft_s=ttft,
        stages=(*stages, rest),
        evidence=say("the first token takes {arm.ttft}", arm=arm),
    )


def _stages(known: Known, arm: Group) -> Iterator[Stage]:
    for name, keys in (("queue", ("queue",)), ("look-up", _LOOKUP)):
        measured = _sum(arm, keys)
        if measured is not None:
            yield Stage(name=name, seconds=measured, is_measured=True)
    load = load_s(known, arm)
    if load is not None:
        yield load
    gap = arm.number("ready_gap")
    if gap is not None:
        yield Stage(name="ready, not run", seconds=gap, is_measured=True)
    prefill = arm.number("prefill")
    if prefill is not None:
        yield Stage(name="prefill", seconds=prefill, is_measured=True)
        return
    prompt, hit, rate = arm.number("prompt"), hit_tokens(arm), prefill_rate(known)
    if prompt is not None and hit is not None and rate and arm.text("cache") not in _NO_HIT:
        left = max(0.0, prompt - hit)
        yield Stage(name="prefill", seconds=left / rate, is_measured=False)


def load_s(known: Known, arm: Group) -> Stage | None:
    """What loading takes in an arm, measured or computed."""
    measured = _sum(arm, ("load",))
    measured = _sum(arm, _LOAD) if measured is None else measured
    if measured is not None:
        return Stage(name="load", seconds=measured, is_measured=True)
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
    if is_inherited and key in ("load", *_LOAD) and arm.text("cache") in _NO_HIT:
        return None
    return arm.number(key)
