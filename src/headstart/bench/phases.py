"""What is done before a load is sent once more: the phases of a run, and what they need.

cold            every cache emptied; the load's first time
steady          nothing: the same load again, with the same salt
engine-restart  the server ended and started
node-restart    the node ended and started, the engine's own cache emptied
host-cold       both ended, the page cache dropped, both started
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from pathlib import Path

from headstart.bench.arms import Arm
from headstart.errors import ConfigError, HeadstartError

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


class Phase(enum.StrEnum):
    """See the module."""

    ONLY = ""
    """The load, once, by whatever the server holds."""
    COLD = "cold"
    STEADY = "steady"
    ENGINE_RESTART = "engine-restart"
    NODE_RESTART = "node-restart"
    HOST_COLD = "host-cold"

    @property
    def is_again(self) -> bool:
        """Whether the load was sent before."""
        return self not in (Phase.ONLY, Phase.COLD)

    @property
    def is_restart(self) -> bool:
        """Whether something lost its memory before it."""
        return self in (Phase.ENGINE_RESTART, Phase.NODE_RESTART, Phase.HOST_COLD)


def parse_phases(text: str) -> tuple[Phase, ...]:
    """The phases of `cold,steady`, in order; of an empty text the one without a name.

    Raises ConfigError.
    """
    if not text.strip():
        return (Phase.ONLY,)
    names = [name.strip() for name in text.split(",")]
    known = [str(phase) for phase in Phase if phase]
    for name in names:
        if name not in known:
            raise ConfigError(f"--phases {name!r} is unknown; known: {', '.join(known)}")
    if len(set(names)) < len(names):
        raise ConfigError("--phases: each phase can be there once")
    phases = tuple(map(Phase, names))
    if phases[0] is not Phase.COLD:
        raise ConfigError(
            f"--phases: {phases[0]} asks a load again; begin with cold, which asks it first"
        )
    return phases


def check_phases(
    phases: Sequence[Phase], arms: Sequence[Arm], *, drop_caches: Path = _DROP_CACHES
) -> None:
    """Find out before anything starts what cannot be done. `arms`: none for a server at a URL.

    Raises ConfigError.
    """
    restarts = [phase for phase in phases if phase.is_restart]
    if restarts and not arms:
        raise ConfigError(
            f"--phases: {restarts[0]} needs a server that the bench starts itself: name --arm "
            "NAME=WHAT instead of --url"
        )
    without = [arm.name for arm in arms if not arm.has_node]
    if Phase.NODE_RESTART in phases and without:
        raise ConfigError(
            f"--phases: {Phase.NODE_RESTART} makes no sense for the arm {without[0]}, which has no "
            "node; leave one of them out (an arm has a node if it is headstart, or says {socket})"
        )
    if Phase.HOST_COLD in phases and not os.access(drop_caches, os.W_OK):
        raise ConfigError(
            f"--phases: {Phase.HOST_COLD} drops the page cache, which only the superuser may; run "
            f"as root, or leave it out ({drop_caches} cannot be written)"
        )


def rounds_of(arms: Sequence[str], num_rounds: int) -> list[tuple[int, str]]:
    """Who is measured when: (round, arm); each round begins with the next arm.

    So that no arm is always the one that finds the machine warm: A B, B A, or A B C, B C A, C A B.
    """
    count = len(arms)
    return [
        (number, arms[(number + place) % count])
        for number in range(num_rounds)
        for place in range(count)
    ]


def drop_page_cache() -> None:
    """Write back and forget the page cache of the whole machine. Raises HeadstartError."""
    os.sync()
    try:
        _DROP_CACHES.write_text("3\n", encoding="ascii")
    except OSError as error:
        raise HeadstartError(f"the page cache cannot be dropped: {error}") from error
