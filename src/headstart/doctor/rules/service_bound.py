"""The first token's time grows with what is in flight: one server works off a queue.

    TTFT(c2) / TTFT(c1) >= (c2 / c1) ^ 0.7        over a sweep of at least 4 times

A server with room batches: its TTFT grows slowly until it is full, then as c (Little's law).
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import alike, common, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_POWER = 0.7
_SWEEP = 4.0


def find(known: Known) -> Iterator[Sign]:
    """Arms of a sweep of concurrency."""
    sweep = [arm for arm in known.arms if arm.numbers("concurrency", "ttft")]
    sweep.sort(key=lambda arm: arm.number("concurrency") or 0.0)
    if len(sweep) < 3:
        return
    few, many = sweep[0], sweep[-1]
    if few.text("cache") != many.text("cache") or not alike(few, many, but="concurrency"):
        return
    key = common(few, many)
    if not key:
        return
    spread = ratio(many.number("concurrency") or 0.0, few.number("concurrency") or 0.0)
    late, soon = many.number(key) or 0.0, few.number(key) or 0.0
    grown = ratio(late, soon)
    if spread < _SWEEP or grown <= spread**_POWER:
        return
    yield Sign(
        strength=Strength.COMPUTED,
        margin=grown / spread**_POWER,
        explained_s=late - soon,
        evidence=(
            say(
                f"{{few.{key}}} with {{few.concurrency}} in flight, {{many.{key}}} with "
                "{many.concurrency}: each waits for the others",
                few=few,
                many=many,
            ),
        ),
        is_symptom=True,
    )


RULE = Rule(
    name="service_bound",
    cause=Cause.ROUTING,
    needs=(("arms.concurrency", "arms.ttft_p50"),),
    find=find,
    fixes=(
        Fix(text="more prefill workers, or less in flight on each"),
        Fix(text="chunked prefill, so that first tokens come out in between"),
        Fix(text="no cache helps a queue of prompts that all have to be computed"),
    ),
)
