"""One worker for all loads: a large one blocks the small ones until they time out.

tokens found > 2 * tokens delivered, workers = 1
TTFT of short prompts in the mix / alone > 5, workers = 1, loads time out
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, one_loader, ratio
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_PART = 2.0
_SLOWER = 5.0


def find(known: Known) -> Iterator[Sign]:
    """Tiers with one worker that does not keep up."""
    for tier in known.tiers:
        yield from _blocked(known, tier)
        told = tier.numbers("found", "delivered", "workers")
        if told is None or told[2] > TOLERANCE or ratio(told[0], told[1]) <= _PART:
            continue
        if tier.number("room") is not None:
            continue  # then room, not workers, is the question
        timeouts = ", {tier.num_timeouts} timed out" if tier.number("num_timeouts") else ""
        yield Sign(
            strength=Strength.COMPUTED if timeouts else Strength.COMPARED,
            margin=ratio(told[0], _PART * told[1]),
            share=1.0 - told[1] / told[0],
            evidence=(
                say(
                    "{tier.name} held {tier.found}, {tier.delivered} came, through "
                    "{tier.workers} worker" + timeouts,
                    tier=tier,
                ),
            ),
        )


def _blocked(known: Known, tier: Group) -> Iterator[Sign]:
    """Short prompts that wait for their small loads."""
    if not one_loader(tier):
        return
    for arm in known.situations:
        told = arm.numbers("ttft_short", "ttft_short_alone")
        if told is not None and told[0] > _SLOWER * told[1]:
            yield Sign(
                strength=Strength.COMPARED,
                margin=ratio(told[0], _SLOWER * told[1]),
                share=1.0 - told[1] / told[0],
                evidence=(
                    say(
                        "short prompts take {arm.ttft_short}, alone {arm.ttft_short_alone}, and "
                        "{tier.num_timeouts} loads timed out, through {tier.workers} worker",
                        arm=arm,
                        tier=tier,
                    ),
                ),
            )


RULE = Rule(
    name="one_worker",
    cause=Cause.IO_PARALLELISM,
    needs=(
        ("tiers.found", "tiers.delivered", "tiers.workers"),
        ("arms.ttft_short", "arms.ttft_short_alone", "tiers.workers", "tiers.num_timeouts"),
    ),
    find=find,
    fixes=(
        Fix(engine="sglang", text="prefetch_io_workers in --hicache-storage-backend-extra-config"),
        Fix(text="several workers, and large loads cut into pieces that take turns"),
    ),
)
