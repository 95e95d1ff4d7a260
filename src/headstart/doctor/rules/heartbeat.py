"""The scheduler's thread stands still.

    longest gap > 0.1 s, and > 3 steps

0.1 s are twenty of Python's switch intervals (5 ms): somebody held the GIL in native code
(pickling, writing a file) or the process was stopped.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_GAP_S = 0.1
_STEPS = 3.0


def find(known: Known) -> Iterator[Sign]:
    """Arms with a gap."""
    for arm in known.situations:
        gap, step = arm.number("heartbeat_gap"), arm.number("step")
        bound = max(_GAP_S, _STEPS * (step or 0.0))
        if gap is None or gap <= bound:
            continue
        yield Sign(
            strength=Strength.COMPARED,
            margin=ratio(gap, bound),
            explained_s=gap if arm.number("ttft") else None,
            evidence=(say("the scheduler's thread did not run for {arm.heartbeat_gap}", arm=arm),),
        )


RULE = Rule(
    name="heartbeat",
    cause=Cause.LOCK_CONTENTION,
    needs=(("arms.heartbeat_gap", "arms.step"),),
    find=find,
    fixes=(
        Fix(text="save from another process, or with a writer that releases the GIL (numpy, mmap)"),
        Fix(text="py-spy dump during a gap"),
    ),
)
