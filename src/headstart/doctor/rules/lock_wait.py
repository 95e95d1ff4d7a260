"""Waiting for locks that was measured.

    lock wait / TTFT > 10 %
    look-up p99 / median > 10 for look-ups of thousands of keys: each takes and gives back a lock

Locks taken a key at a time meet whoever evicts; a look-up of few keys that is slow at times is the
network's business.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import MATERIAL, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_TAIL = 10.0
_MANY = 1000.0


def find(known: Known) -> Iterator[Sign]:
    """Arms that wait for locks."""
    for arm in known.situations:
        wait, ttft = arm.number("lock_wait"), arm.number("ttft")
        if wait and ttft and wait > MATERIAL * ttft:
            yield Sign(
                strength=Strength.SEEN,
                margin=ratio(wait, MATERIAL * ttft),
                explained_s=wait,
                evidence=(say("{arm.lock_wait} of {arm.ttft} is waiting for locks", arm=arm),),
            )
        told = arm.numbers("lookup_p99", "lookup", "keys_per_lookup")
        if told is not None and told[0] > _TAIL * told[1] and told[2] > _MANY:
            yield Sign(
                strength=Strength.COMPARED,
                margin=min(ratio(told[0], _TAIL * told[1]), ratio(told[2], _MANY)),
                evidence=(
                    say(
                        "a look-up of {arm.keys_per_lookup} keys takes {arm.lookup}, at p99 "
                        "{arm.lookup_p99}",
                        arm=arm,
                    ),
                ),
            )


RULE = Rule(
    name="lock_wait",
    cause=Cause.LOCK_CONTENTION,
    needs=(
        ("arms.lock_wait", "arms.ttft_p50"),
        ("arms.lookup_p99", "arms.lookup", "arms.keys_per_lookup"),
    ),
    find=find,
    fixes=(
        Fix(text="group keys by lock and take each once; evict in small batches outside of it"),
        Fix(text="shorter critical sections: no I/O, no freeing of memory under a lock"),
    ),
)
