"""A mean that says something else than the requests.

    mean / median > 5, with no 99th percentile beside it, and no 90th of over 1.5 times the mean
    mean falls while concurrency rises

Times to the first token are skewed: of a log-normal with sigma 1.5, already a spread of 20 times
between the 2nd and the 98th percentile of the middle, the mean is 3 times the median. At 5 times, a
few requests make the figure, unless a tenth of them is later still. And more requests at once
cannot make the same server sooner.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_SKEW = 5.0


def find(known: Known) -> Iterator[Sign]:
    """Arms that are only known by a mean that misleads."""
    for arm in known.situations:
        told = arm.numbers("ttft_mean", "ttft_p50")
        if told is None or arm.number("ttft_p99") is not None:
            continue
        if (arm.number("ttft_p90") or 0.0) > TOLERANCE * told[0]:
            continue
        if told[0] > _SKEW * told[1]:
            yield Sign(
                strength=Strength.COMPUTED,
                margin=ratio(told[0], _SKEW * told[1]),
                evidence=(
                    say(
                        "the mean of {arm.ttft_mean} is {times:.0f} times the median of "
                        "{arm.ttft_p50}: a few requests make it",
                        arm=arm,
                        times=told[0] / told[1],
                    ),
                ),
            )
    timed = [arm for arm in known.arms if arm.numbers("ttft_mean", "concurrency")]
    for one in timed:
        for other in timed:
            fewer, more = (
                one.numbers("concurrency", "ttft_mean"),
                other.numbers("concurrency", "ttft_mean"),
            )
            if fewer is None or more is None or one.text("cache") != other.text("cache"):
                continue
            if more[0] > TOLERANCE * fewer[0] and fewer[1] > TOLERANCE * more[1]:
                yield Sign(
                    strength=Strength.COMPUTED,
                    margin=ratio(fewer[1], TOLERANCE * more[1]),
                    evidence=(
                        say(
                            "the mean falls from {one.ttft_mean} to {other.ttft_mean} while "
                            "{one.concurrency} in flight become {other.concurrency}",
                            one=one,
                            other=other,
                        ),
                    ),
                )


RULE = Rule(
    name="mean_hides",
    cause=Cause.MEASUREMENT,
    needs=(("arms.ttft_mean", "arms.ttft_p50"), ("arms.ttft_mean", "arms.concurrency")),
    find=find,
    fixes=(
        Fix(text="report p50 and p99, and the queue apart from the rest"),
        Fix(text="leave the first requests of each run out, and start every run from one state"),
        Fix(text="measure one request at a time first: that is the time without a queue"),
    ),
)
