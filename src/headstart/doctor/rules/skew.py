"""One worker is full while another is idle: the fleet's mean looks fine.

load of the fullest / mean of the others > 3, while one has a third of that mean or less
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_MORE = 3.0
_IDLE = 1.0 / 3.0


def find(known: Known) -> Iterator[Sign]:
    """Workers of unequal load."""
    loads = [
        ((worker.number("running") or 0.0) + (worker.number("waiting") or 0.0), worker)
        for worker in known.workers
        if worker.number("running") is not None or worker.number("waiting") is not None
    ]
    if len(loads) < 2:
        return
    loads.sort(key=lambda each: each[0])
    (least, idle), (most, full) = loads[0], loads[-1]
    others = sum(each[0] for each in loads[:-1]) / (len(loads) - 1)
    if most > _MORE * max(1.0, others) and least <= max(1.0, _IDLE * most):
        hits = full.number("hit_rate")
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(most, _MORE * max(1.0, others)),
            share=1.0 - max(1.0, others) / most,
            evidence=(
                say(
                    f"{{full.name}} has {_spelled(full, 'full')}, {{idle.name}} "
                    + _spelled(idle, "idle")
                    + ("; it hits {full.hit_rate}" if hits is not None else ""),
                    full=full,
                    idle=idle,
                ),
            ),
        )


def _spelled(worker: Group, name: str) -> str:
    keys = [key for key in ("running", "waiting") if worker.fact(key) is not None]
    return " and ".join(f"{{{name}.{key}}} {key}" for key in keys)


RULE = Rule(
    name="skew",
    cause=Cause.ROUTING,
    needs=(("workers.running", "workers.waiting"),),
    find=find,
    fixes=(
        Fix(text="cache-aware routing with a guard: beyond a load, take the next worker"),
        Fix(
            engine="sglang", text="router --balance-abs-threshold and --balance-rel-threshold lower"
        ),
        Fix(text="do not pin by consistent hash alone; watch hit rate and queue by worker"),
    ),
)
