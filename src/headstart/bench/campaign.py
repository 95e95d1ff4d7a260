"""Every arm, every round, every phase: the runs of a campaign, in order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from headstart.bench.phases import Phase, rounds_of
from headstart.bench.rebuild import rebuild_times
from headstart.bench.run import Request, Run
from headstart.bench.serve import Load
from headstart.bench.served import Served

Advance = Callable[[str, int, int], None]
"""Called with (what is being done, requests done, requests in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is done."""

    phases: tuple[Phase, ...] = (Phase.ONLY,)
    num_rounds: int = 1
    one_at_a_time: bool = False
    """Whether an arm is started for each round and ended after it; else all are there at once."""
    salt: str = ""
    """Of the first round; runs of a round have the same, and each round has another."""

    def salt_of(self, number: int) -> str:
        """The salt of a round."""
        return self.salt if self.num_rounds == 1 else f"{self.salt}-{number + 1}"


def run_campaign(
    arms: Sequence[Served],
    load: Load,
    plan: Plan,
    keep: Callable[[Run], None],
    advance: Advance,
) -> None:
    """Give each run to `keep` as soon as it is over.

    Raises HeadstartError when an arm cannot go on; whatever was started is ended.
    """
    by_name = {arm.name: arm for arm in arms}
    with contextlib.ExitStack() as stack:
        if not plan.one_at_a_time:
            # One after the other: vLLM measures the free memory while it starts.
            for arm in arms:
                advance(f"{arm.name}: starting", 0, len(load.asks))
                stack.callback(arm.end)
                arm.start()
        for number, name in rounds_of(list(by_name), plan.num_rounds):
            with contextlib.ExitStack() as visit:
                arm = by_name[name]
                if plan.one_at_a_time:
                    advance(f"{name}: starting", 0, len(load.asks))
                    visit.callback(arm.end)
                    arm.start()
                _visit(arm, number, load, plan, keep, advance)


def _visit(
    arm: Served,
    number: int,
    load: Load,
    plan: Plan,
    keep: Callable[[Run], None],
    advance: Advance,
) -> None:
    """All phases of an arm in a round."""
    steady: Sequence[Request] | None = None
    total = len(load.asks)
    for phase in plan.phases:
        parts = (f"round {number + 1} of {plan.num_rounds}", arm.name, str(phase))
        title = ", ".join(part for part in parts if part)
        advance(f"{title}: getting ready", 0, total)
        arm.ready(phase, load)
        run = arm.run(
            phase,
            load,
            plan.salt_of(number),
            lambda done, title=title: advance(title, done, total),  # type: ignore[misc]
        )
        if phase is Phase.STEADY:
            steady = run.requests
        rebuild = rebuild_times(run.requests, steady) if phase.is_restart and steady else None
        keep(msgspec.structs.replace(run, round=number, rebuild=rebuild))
        arm.settle()
