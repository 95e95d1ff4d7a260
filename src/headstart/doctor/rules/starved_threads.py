"""Threads that do not get to run while the engine is idle: somebody spins, and holds the GIL.

    time until a backlog is gone / time it takes alone > 3, with the scheduler's thread at 100 % CPU
    all stages longer at once, those without any I/O too

A shared GIL at Python's default switch interval costs a few percent, not a factor; so nothing is
said below a factor of 3 (`TOLERANCE` squared, and then some).
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_SLOWER = 3.0
_SPINS = 0.8
_IDLE = 0.3
_ALL = 2.0


def find(known: Known) -> Iterator[Sign]:
    """Arms whose background work starves."""
    for arm in known.situations:
        spins = (arm.number("scheduler_cpu") or 0.0) > _SPINS
        told = arm.numbers("drain", "drain_alone")
        if told is not None and told[0] > _SLOWER * told[1]:
            busy = arm.number("engine_busy")
            idle = busy is not None and busy < _IDLE
            yield Sign(
                strength=Strength.SEEN if spins and idle else Strength.COMPARED,
                margin=ratio(told[0], _SLOWER * told[1]),
                evidence=(
                    say(
                        "a backlog takes {arm.drain} that needs {arm.drain_alone}"
                        + (
                            ", the engine busy {arm.engine_busy} of the time"
                            if busy is not None
                            else ""
                        )
                        + (
                            ", the scheduler's thread at {arm.scheduler_cpu} of a core"
                            if spins
                            else ""
                        ),
                        arm=arm,
                    ),
                ),
            )
        together = arm.number("stages_together")
        if together is not None and together > _ALL:
            yield Sign(
                strength=Strength.COMPARED if spins else Strength.HINTED,
                margin=ratio(together, _ALL),
                share=1.0 - 1.0 / together,
                evidence=(
                    say("all stages take {arm.stages_together} times as long at once", arm=arm),
                ),
            )


RULE = Rule(
    name="starved_threads",
    cause=Cause.LOCK_CONTENTION,
    needs=(("arms.drain", "arms.drain_alone", "arms.scheduler_cpu"), ("arms.stages_together",)),
    find=find,
    fixes=(
        Fix(text="let the idle loop block on an event, or yield with sleep(0)"),
        Fix(
            text="move I/O to a process of its own: dropping the GIL alone lets producers outrun it"
        ),
        Fix(text="py-spy dump --native while it stalls, to see who holds the GIL"),
    ),
)
