"""The queue is most of the first token: queue / TTFT > 50 %.

It says where, not why: what holds the device, or who is let in first, are other rules. vLLM counts
waiting for an asynchronous load as queue, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio, subject
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_HALF = 0.5


def find(known: Known) -> Iterator[Sign]:
    """The arm in question, if it queues."""
    arm = subject(known)
    told = arm.numbers("queue", "ttft") if arm else None
    if arm is None or told is None or told[0] <= _HALF * told[1]:
        return
    yield Sign(
        strength=Strength.COMPUTED,
        margin=ratio(told[0], _HALF * told[1]),
        explained_s=told[0],
        evidence=(say("{arm.queue} of {arm.ttft} is the queue", arm=arm),),
        is_symptom=True,
    )


RULE = Rule(
    name="queue_dominates",
    cause=Cause.ROUTING,
    needs=(("arms.queue", "arms.ttft_p50"),),
    find=find,
    fixes=(
        Fix(text="less load on a replica: more of them, or fewer requests in flight"),
        Fix(text="measure one request alone: what remains then is not the queue"),
        Fix(text="start look-up and load when a request arrives, so that they run while it waits"),
    ),
)
