"""Blocks that exist when asked for, and fail to be read.

    failed reads / blocks found > 5 %
    or, where nobody says how many were found: failed reads / requests > 5 %

The engine has already counted them as hits, and computes them after waiting. A store that evicts
between look-up and read loses some; beyond one in twenty it is stale metadata or damage.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import hitting, ratio
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_FAILED = 0.05


def find(known: Known) -> Iterator[Sign]:
    """A tier that says it holds more than it gives."""
    for tier in known.tiers:
        told = tier.numbers("num_failed_reads", "num_found")
        if told is None:
            yield from _by_requests(known, tier)
        if told is None or ratio(*told) <= _FAILED:
            continue
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(*told) / _FAILED,
            evidence=(
                say(
                    "{tier.num_failed_reads} of {tier.num_found} blocks that {tier.name} said it "
                    "holds could not be read",
                    tier=tier,
                ),
            ),
        )


def _by_requests(known: Known, tier: Group) -> Iterator[Sign]:
    """A load that failed was waited for, and computed after that."""
    failed = tier.number("num_failed_reads")
    counts = [(n, arm) for arm in hitting(known) if (n := arm.number("num_requests"))]
    if not failed or not counts:
        return
    most, arm = max(counts, key=lambda each: each[0])
    if ratio(failed, most) > _FAILED:
        yield Sign(
            strength=Strength.COMPARED,
            margin=ratio(failed, most) / _FAILED,
            evidence=(
                say(
                    "{tier.num_failed_reads} loads from {tier.name} failed in {arm.num_requests} "
                    "requests",
                    tier=tier,
                    arm=arm,
                ),
            ),
        )


RULE = Rule(
    name="failed_reads",
    cause=Cause.CORRECTNESS,
    needs=(("tiers.num_failed_reads", "tiers.num_found"),),
    find=find,
    fixes=(
        Fix(text="empty the tier: its index is not what is on the medium"),
        Fix(engine="vllm", text='"kv_load_failure_policy": "recompute" in --kv-transfer-config'),
        Fix(
            text="look for objects over 2 GB, truncated files, and two processes that own one path"
        ),
    ),
)
