"""A way of routing, or ordering, that makes the first token later than another one.

    TTFT with one / with the other > 1.5, nothing else differs

What it saves is at most the shared part of a prompt; what it costs is the queue in front of one
worker.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, alike, common, differs, ratio
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.doctor.quantities import show_share


def find(known: Known) -> Iterator[Sign]:
    """Two arms that differ in routing."""
    timed = [arm for arm in known.arms if arm.number("ttft") and arm.text("routing")]
    for slow in timed:
        for fast in timed:
            if not differs(slow, fast, "routing") or not alike(slow, fast, but="routing"):
                continue
            key = common(slow, fast)
            if not key:
                continue
            late, soon = slow.number(key) or 0.0, fast.number(key) or 0.0
            if slow.text("cache") == fast.text("cache") and late > TOLERANCE * soon:
                yield Sign(
                    strength=Strength.COMPUTED,
                    margin=ratio(late, TOLERANCE * soon),
                    explained_s=late - soon,
                    evidence=(
                        say(
                            f"{{slow.{key}}} with {{slow.routing}}, {{fast.{key}}} with "
                            "{fast.routing}" + _shared(slow),
                            slow=slow,
                            fast=fast,
                        ),
                    ),
                )


def _shared(arm: Group) -> str:
    told = arm.numbers("shared_tokens", "prompt")
    return (
        f"; only {show_share(told[0] / told[1])} of a prompt is shared" if told and told[1] else ""
    )


RULE = Rule(
    name="routing_costs",
    cause=Cause.ROUTING,
    needs=(("arms.routing", "arms.ttft_p50"),),
    find=find,
    fixes=(
        Fix(text="route by load where prompts share little or there is one prefix for all"),
        Fix(text="bound how long a request may be put back for one that hits more"),
    ),
)
