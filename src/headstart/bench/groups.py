"""Runs that belong together: of one arm and phase, at one pace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headstart.bench.run import Run
from headstart.bench.summary import shown

_MAX_PART = 32
_ARM, _PHASE, _PACE = 0, 1, 4
"""Places in the key of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs that differ in nothing that is known."""

    name: str
    """What tells it from the other groups, for people."""
    curve: str
    """The same without its pace: groups of one curve are points of it."""
    timeline: str
    """The same without its phase: groups of one timeline follow each other."""
    arm: str
    phase: str
    workload: str
    tool: str
    pace: str
    runs: tuple[Run, ...]


def group_runs(named: Iterable[tuple[str, Run]]) -> list[Group]:
    """Groups in the order in which they first come. A run without an arm has its file's name."""
    found: dict[tuple[str, ...], list[Run]] = {}
    for name, run in named:
        phase = run.phase
        parts = (run.arm or name, phase, run.workload, run.tool, told_pace(run))
        found.setdefault(parts, []).append(run)
    columns = [_told_apart(column) for column in zip(*found, strict=True)]

    def title(key: tuple[str, ...], without: int | None = None) -> str:
        parts = [
            names[part]
            for number, (names, part) in enumerate(zip(columns, key, strict=True))
            if (number == _ARM or len(names) > 1) and part and number != without
        ]
        return ", ".join(parts)

    groups = []
    for key, runs in found.items():
        texts = [names[part] for names, part in zip(columns, key, strict=True)]
        arm, phase, workload, tool, pace = texts
        groups.append(
            Group(
                name=title(key),
                curve=title(key, without=_PACE),
                timeline=title(key, without=_PHASE),
                arm=arm,
                phase=phase,
                workload=workload,
                tool=tool,
                pace=pace,
                runs=tuple(runs),
            )
        )
    return groups


def _told_apart(texts: Iterable[str]) -> dict[str, str]:
    """Each text as it is shown; what is cut to the same gets numbers."""
    names: dict[str, str] = {}
    for text in dict.fromkeys(texts):
        name = shown(text, _MAX_PART)
        same = sum(shown(other, _MAX_PART) == name for other in names)
        names[text] = f"{name} ({same + 1})" if same else name
    return names


def told_pace(run: Run) -> str:
    """How it was sent, as text for people; empty: not known."""
    pace = run.pace or {}
    return ", ".join(
        f"{name.removesuffix('_s')} {value:g}" for name, value in pace.items() if value
    )
