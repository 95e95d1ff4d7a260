"""A load that never comes, or once in a while does not: the request waits for it.

loads timed out, and not so few that the mean first token hardly shows it:
    timeouts / requests * deadline > a tenth of TTFT, or 1 % of the requests
load p99 / median > 10 and load p99 > computing the same tokens
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import MATERIAL, TOLERANCE, hitting, ratio, recompute_s, subject
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.units import format_seconds

_TAIL = 10.0
_RARE = 0.01


def find(known: Known) -> Iterator[Sign]:
    """Tiers that time out, arms whose slowest loads lose."""
    for tier in known.tiers:
        delivered = tier.number("delivered")
        arm = subject(known) or known.top
        if (
            tier.number("num_timeouts")
            and (delivered is None or tier.number("workers") is None)
            and not _are_rare(arm, tier)
        ):
            idle = arm.number("running") == 0.0 and (arm.number("waiting") or 0.0) > 0.0
            yield Sign(
                strength=Strength.SEEN if idle else Strength.COMPARED,
                margin=TOLERANCE,
                explained_s=arm.number("load"),
                evidence=(
                    say(
                        "{tier.num_timeouts} loads from {tier.name} timed out"
                        + (
                            ", with {arm.waiting} waiting and {arm.running} running" if idle else ""
                        ),
                        tier=tier,
                        arm=arm,
                    ),
                ),
            )
    for arm in hitting(known):
        tail, load, computing = arm.number("load_p99"), arm.number("load"), recompute_s(known, arm)
        if tail and load and tail > _TAIL * load and computing and tail > computing:
            yield Sign(
                strength=Strength.COMPUTED,
                margin=min(ratio(tail, _TAIL * load), ratio(tail, computing)),
                explained_s=tail - computing,
                evidence=(
                    say(
                        "loads take {arm.load}, at p99 {arm.load_p99}; computing takes {computing}",
                        arm=arm,
                        computing=format_seconds(computing),
                    ),
                ),
            )


def _are_rare(arm: Group, tier: Group) -> bool:
    told = arm.numbers("num_requests", "ttft", "deadline")
    if told is None:
        return False
    share = ratio(tier.number("num_timeouts") or 0.0, told[0])
    return share < _RARE and share * told[2] < MATERIAL * told[1]


RULE = Rule(
    name="dead_transfer",
    cause=Cause.SLOW_TIER,
    needs=(("tiers.num_timeouts", "arms.running", "arms.waiting"), ("arms.load_p99", "arms.load")),
    find=find,
    fixes=(
        Fix(text="a deadline of what computing takes, and then compute what has not come"),
        Fix(engine="vllm", text='"kv_load_failure_policy": "recompute" in --kv-transfer-config'),
        Fix(engine="sglang", text="--hicache-storage-prefetch-policy timeout, with a shorter base"),
        Fix(text="check the path between the two hosts: device names, GID index, MTU, firewall"),
    ),
)
