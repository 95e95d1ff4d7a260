"""The queue is most of the first token: queue / TTFT > 50 %.

It says where, not why: what holds the device, or who is let in first, are other rules. vLLM counts
waiting for an asynchronous load as queue, too: that is left out, as no other request makes it.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio, subject
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.doctor.split import queued_s, whole
from headstart.units import format_seconds

_HALF = 0.5


def find(known: Known) -> Iterator[Sign]:
    """The arm in question, if it queues."""
    arm = subject(known)
    queued, ttft = (queued_s(known, arm), whole(arm)) if arm else (None, None)
    if arm is None or queued is None or ttft is None:
        return
    bound = _HALF * ttft.slack * ttft.seconds
    if queued <= bound:
        return
    beside = "" if queued == arm.number("queue") else ", {queued} without waiting for loads"
    yield Sign(
        strength=Strength.COMPUTED,
        margin=ratio(queued, bound),
        explained_s=queued,
        evidence=(
            say(
                f"{{arm.queue}} of {{arm.{ttft.key}}} is the queue{beside}",
                arm=arm,
                queued=format_seconds(queued),
            ),
        ),
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
