"""Look-ups that queue for the one thread that makes them.

    utilisation = requests/s * (hash + look-up) > 0.8

At 80 % of one thread a request waits for four others on average (M/M/1: 0.8 / (1 - 0.8)); from
100 % on the queue has no end, and is all of this making.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.doctor.quantities import show_share
from headstart.doctor.split import queued_s
from headstart.units import format_seconds

_BUSY = 0.8


def find(known: Known) -> Iterator[Sign]:
    """Arms whose look-ups fill a thread."""
    for arm in known.situations:
        key = "lookups_per_s" if arm.number("lookups_per_s") else "requests_per_s"
        rate = arm.number(key)
        cost = (arm.number("hash") or 0.0) + (arm.number("lookup") or 0.0)
        if not rate or not cost or rate * cost <= _BUSY:
            continue
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(rate * cost, _BUSY),
            explained_s=_waited_s(queued_s(known, arm), rate * cost, cost),
            evidence=(
                say(
                    f"{{arm.{key}}} at {{cost}} each fill {{share}} of a thread",
                    arm=arm,
                    cost=format_seconds(cost),
                    share=show_share(rate * cost),
                ),
            ),
        )


def _waited_s(queue: float | None, busy: float, cost: float) -> float | None:
    """Of a queue, what waits for that thread; None where no queue was told."""
    if queue is None or busy >= 1.0:
        return queue
    return min(queue, cost * busy / (1.0 - busy))


RULE = Rule(
    name="lookup_queue",
    cause=Cause.LOOKUP_CPU,
    needs=(("arms.lookup", "arms.lookups_per_s"), ("arms.lookup", "arms.requests_per_s")),
    find=find,
    fixes=(
        Fix(text="look up when the request arrives, not on the scheduler's thread"),
        Fix(text="ask for all keys of a prompt in one call"),
        Fix(engine="lmcache", text="enable_async_loading: true"),
        Fix(text="more replicas; larger blocks"),
    ),
)
