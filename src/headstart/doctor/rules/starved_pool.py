"""No room in the pool that loads pass through.

pool / fetch < loads at once
found in the tier > delivered, and the pool's room is what was delivered
loads given up at their deadline: the tail of the TTFT is made of deadlines
allocations that fail: more than 1 % of the requests, or ten
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_FAILED = 0.01
_SOME = 10.0
_PART = 2.0


def find(known: Known) -> Iterator[Sign]:
    """Arms and tiers whose pool is too small."""
    for arm in known.situations:
        yield from _failures(arm)
        yield from _pieces(arm)
        yield from _deadlines(arm)
    for tier in known.tiers:
        told = tier.numbers("found", "delivered", "room")
        if told is None:
            continue
        found, delivered, room = told
        if found > _PART * delivered and room < _PART * delivered:
            yield Sign(
                strength=Strength.COMPUTED,
                margin=min(ratio(found, _PART * delivered), ratio(_PART * delivered, room)),
                share=1.0 - delivered / found,
                evidence=(
                    say(
                        "{tier.name} held {tier.found}, and {tier.delivered} came: its buffer had "
                        "room for {tier.room}",
                        tier=tier,
                    ),
                ),
            )


def _failures(arm: Group) -> Iterator[Sign]:
    count, requests = arm.number("num_alloc_failures"), arm.number("num_requests")
    margin = ratio(count or 0.0, _FAILED * requests if requests else _SOME)
    if margin > 1.0:
        of = " in {arm.num_requests} requests" if requests else ""
        yield Sign(
            strength=Strength.SEEN if requests else Strength.COMPUTED,
            margin=margin,
            evidence=(say("{arm.num_alloc_failures} allocations failed or waited" + of, arm=arm),),
        )


def _pieces(arm: Group) -> Iterator[Sign]:
    told = arm.numbers("pool", "fetch")
    if told is None or not told[1]:
        return
    loads = max(1.0, arm.number("loads_in_flight") or arm.number("concurrency") or 1.0)
    pieces = told[0] / told[1]
    if pieces < loads:
        refused = "; {arm.num_rejects} loads were refused" if arm.number("num_rejects") else ""
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(loads, pieces),
            evidence=(
                say(
                    "a pool of {arm.pool} has room for {pieces} of {arm.fetch}, and {loads:.0f} "
                    "want one" + refused,
                    arm=arm,
                    pieces=f"{int(pieces)} pieces" if pieces >= 1.0 else "not one piece",
                    loads=loads,
                ),
            ),
        )


def _deadlines(arm: Group) -> Iterator[Sign]:
    told = arm.numbers("num_rejects", "deadline", "ttft_tail")
    if told is None or not told[0] or told[2] < told[1]:
        return
    yield Sign(
        strength=Strength.COMPUTED,
        margin=ratio(told[2], told[1]),
        explained_s=told[1],
        evidence=(
            say(
                "{arm.num_rejects} loads were given up after {arm.deadline}; the slowest first "
                "tokens take {arm.ttft_tail}",
                arm=arm,
            ),
        ),
    )


RULE = Rule(
    name="starved_pool",
    cause=Cause.NO_ROOM,
    needs=(
        ("arms.pool", "arms.fetch"),
        ("tiers.found", "tiers.delivered", "tiers.room"),
        ("arms.num_alloc_failures", "arms.num_requests"),
        ("arms.num_rejects", "arms.deadline", "arms.ttft_p99"),
    ),
    find=find,
    fixes=(
        Fix(text="a pool of at least (loads at once) x (bytes of a load), and pieces that fit it"),
        Fix(engine="sglang", text="raise --hicache-ratio or --hicache-size"),
        Fix(
            engine="lmcache", text="raise max_local_cpu_size; do not let reads share it with stores"
        ),
        Fix(engine="vllm", text="raise cpu_bytes_to_use in kv_connector_extra_config"),
    ),
)
