"""Loads that share a link or a medium: each waits for the bytes of the others.

d TTFT / d (hits in flight) ~ bytes of a load / bandwidth
load under load / alone > 1.5, with several in flight
gain(few ranks) > 20 %, gain(many ranks) < a third of it
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, alike, common, hitting, load_nbytes, pairs, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.doctor.quantities import show_share
from headstart.units import format_seconds

_GAIN = 0.2
_THIRD = 1.0 / 3.0


def find(known: Known) -> Iterator[Sign]:
    """Arms whose loads slow each other down."""
    for arm in hitting(known):
        told = arm.numbers("load", "load_p50_alone")
        if told is None or told[0] <= TOLERANCE * told[1]:
            continue
        in_flight = arm.number("loads_in_flight") or arm.number("concurrency")
        beside = "" if in_flight is None else f", {in_flight:,.0f} in flight"
        yield Sign(
            strength=Strength.COMPUTED if (in_flight or 0.0) > 1.0 else Strength.HINTED,
            margin=ratio(told[0], TOLERANCE * told[1]),
            explained_s=told[0] - told[1],
            evidence=(
                say("a load takes {arm.load}, alone {arm.load_p50_alone}" + beside, arm=arm),
            ),
        )
    yield from _slope(known)
    yield from _ranks(known)


def _slope(known: Known) -> Iterator[Sign]:
    sweep = [arm for arm in hitting(known) if arm.numbers("concurrency", "ttft")]
    sweep.sort(key=lambda arm: arm.number("concurrency") or 0.0)
    if len(sweep) < 2 or not alike(sweep[0], sweep[-1], but="concurrency"):
        return
    few, many = sweep[0], sweep[-1]
    size = load_nbytes(many)
    rates = [rate for tier in known.tiers if (rate := tier.number("bandwidth"))]
    link = min(rates, default=many.number("link_bandwidth") or 0.0)
    more = (many.number("concurrency") or 0.0) - (few.number("concurrency") or 0.0)
    key = common(few, many)
    if not key:
        return
    late = (many.number(key) or 0.0) - (few.number(key) or 0.0)
    grown = ratio(many.number(key) or 0.0, few.number(key) or 0.0)
    if not size or not link or more <= 0.0 or grown <= TOLERANCE:
        return
    each, expected = late / more, size / link
    if expected / TOLERANCE**2 < each < expected * TOLERANCE**2:
        yield Sign(
            strength=Strength.COMPUTED,
            margin=grown / TOLERANCE,
            explained_s=late,
            evidence=(
                say(
                    f"each load more in flight adds {{each}} ({{few.{key}}} at "
                    f"{{few.concurrency}}, {{many.{key}}} at {{many.concurrency}}); the bytes of "
                    "one take {expected}",
                    few=few,
                    many=many,
                    each=format_seconds(each),
                    expected=format_seconds(expected),
                ),
            ),
        )


def _ranks(known: Known) -> Iterator[Sign]:
    found = [pair for pair in pairs(known) if pair.hit.number("ranks")]
    found.sort(key=lambda pair: pair.hit.number("ranks") or 0.0)
    if len(found) < 2:
        return
    few, many = found[0], found[-1]
    gains = 1.0 - few.ratio, 1.0 - many.ratio
    spread = ratio(many.hit.number("ranks") or 0.0, few.hit.number("ranks") or 0.0)
    if spread > TOLERANCE and gains[0] > _GAIN and gains[1] < _THIRD * gains[0]:
        yield Sign(
            strength=Strength.COMPARED,
            margin=min(
                many.ratio / (1.0 - _THIRD * gains[0]), (1.0 - _GAIN) / max(few.ratio, 0.01)
            ),
            explained_s=gains[0] * many.times[0] - many.gain_s,
            evidence=(
                say(
                    "with {few.ranks} rank a hit saves {first}, with {many.ranks} ranks {last}: "
                    "they share one medium",
                    few=few.hit,
                    many=many.hit,
                    first=show_share(gains[0]),
                    last=show_share(gains[1]),
                ),
            ),
        )


RULE = Rule(
    name="loads_share",
    cause=Cause.BANDWIDTH_CONTENTION,
    needs=(
        ("arms.load", "arms.load_p50_alone", "arms.loads_in_flight"),
        ("arms.concurrency", "arms.ttft_p50", "arms.load_nbytes", "tiers.bandwidth"),
    ),
    find=find,
    fixes=(
        Fix(text="bound loads in flight, in order of arrival; compute what would wait"),
        Fix(text="a medium for each rank, or one that gives (ranks) x (bandwidth of one)"),
        Fix(text="fewer bytes: FP8 KV; with MLA one copy for all ranks"),
    ),
)
