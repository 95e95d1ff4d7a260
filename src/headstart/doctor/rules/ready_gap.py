"""The data is there, and the request is not run.

    (ready -> run) / load > 1.5, or / TTFT > 30 %

The scheduler finds out too late: it scans in order, polls once a step, or waits for its batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_SHARE = 0.3


def find(known: Known) -> Iterator[Sign]:
    """Arms with a gap after the load."""
    for arm in known.situations:
        gap, load, ttft = arm.number("ready_gap"), arm.number("load"), arm.number("ttft")
        bounds = [TOLERANCE * load if load else None, _SHARE * ttft if ttft else None]
        bound = max((each for each in bounds if each), default=None)
        if not gap or bound is None or gap <= bound:
            continue
        beside = ", loading {arm.load}" if load else ""
        yield Sign(
            strength=Strength.SEEN,
            margin=ratio(gap, bound),
            explained_s=gap,
            evidence=(
                say("{arm.ready_gap} from all data being there to being run" + beside, arm=arm),
            ),
        )


RULE = Rule(
    name="ready_gap",
    cause=Cause.ROUTING,
    needs=(("arms.ready_gap", "arms.load"),),
    find=find,
    fixes=(
        Fix(text="let finished loads wake the scheduler, and let ready requests pass waiting ones"),
        Fix(
            engine="vllm", text="a connector that answers ready tokens at once instead of deferring"
        ),
        Fix(engine="sglang", text="update; --hicache-storage-prefetch-policy timeout"),
        Fix(text="shorter steps: chunked prefill with fewer tokens a step"),
    ),
)
