"""The link or the memory is busy while first tokens wait.

    link in use > 80 %
    device memory bandwidth in use > 80 %, and TPOT with the tier / without > 1 + noise
    the same, far above what it is without, and TTFT with / without > 1 + noise

A memory bus that is active for more than 80 % of the cycles is saturated for new work (DCGM's note
on DRAM_ACTIVE). Decoding alone keeps it busy, so by itself that is no fault.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, hitting, pairs, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_BUSY = 0.8


def find(known: Known) -> Iterator[Sign]:
    """Arms with a busy link or memory."""
    for arm in hitting(known):
        link = arm.number("link_busy")
        if link is not None and link > _BUSY:
            yield Sign(
                strength=Strength.COMPUTED,
                margin=ratio(link, _BUSY),
                evidence=(say("the link is busy {arm.link_busy} of the time", arm=arm),),
            )
    for pair in pairs(known):
        memory = pair.hit.number("memory_busy")
        if memory is None or memory <= _BUSY or pair.ratio <= 1.0:
            continue
        calm = pair.without.number("memory_busy")
        if calm is not None and calm * TOLERANCE < memory and pair.ratio > 1.0 + pair.noise:
            yield Sign(
                strength=Strength.COMPARED,
                margin=min(ratio(memory, _BUSY), pair.ratio / (1.0 + pair.noise)),
                explained_s=-pair.gain_s,
                evidence=(
                    say(
                        "device memory is busy {hit.memory_busy} with hits, {without.memory_busy} "
                        f"without; the first token takes {{hit.{pair.key}}} instead of "
                        f"{{without.{pair.key}}}",
                        hit=pair.hit,
                        without=pair.without,
                    ),
                ),
            )
        before, after = pair.without.number("tpot"), pair.hit.number("tpot")
        if not before or not after:
            continue
        if after > (1.0 + pair.noise) * before:
            yield Sign(
                strength=Strength.COMPARED,
                margin=min(ratio(memory, _BUSY), after / before / (1.0 + pair.noise)),
                evidence=(
                    say(
                        "device memory is busy {hit.memory_busy}; later tokens take {hit.tpot} "
                        "instead of {without.tpot}",
                        hit=pair.hit,
                        without=pair.without,
                    ),
                ),
            )


RULE = Rule(
    name="busy_link",
    cause=Cause.BANDWIDTH_CONTENTION,
    needs=(("arms.link_busy",), ("arms.memory_busy", "arms.tpot", "arms.cache")),
    find=find,
    fixes=(
        Fix(text="limit the rate of stores; store when no load waits"),
        Fix(text="a share of device memory bandwidth for copies: fewer at a time, larger ones"),
        Fix(text="check PCIe width and generation (nvidia-smi -q), and who else is on the switch"),
    ),
)
