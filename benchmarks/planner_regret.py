"""How far the planner is from the best choice in hindsight, simulated.

    python benchmarks/planner_regret.py --json benchmarks/results/planner_regret.json

A point is an engine, a prompt, a disk's speed, where its prefix lies and a seed. Both cost models
are fitted to a few noisy observations; then a request is planned and executed, asking `may_wait`
at every poll, while the true times of its engine and its disk are off by noise of their own. The
disk works on several blocks at once, which are ready together.

`regret` is what the best of loading all, nothing, and what memory has would have saved, as a share
of that best (`regret`) and of the time without any load (`regret_of_recompute`). The best knows the
noise; `informed` knows the exact costs but not the noise, and no bound: nobody who decides
beforehand does better. `overrun` is the time beyond recompute_s + hedge_s, as a share of
recompute_s: more than a poll only where the engine was off by more than its model's uncertainty.
"""

from __future__ import annotations

import argparse
import json
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np

from headstart.bench.environment import describe
from headstart.costs import EngineCosts, EngineModel, ReadCosts, ReadModel, num_pairs
from headstart.planner import Held, Plan, Prompt, Reason, Wait, may_wait, plan

COLUMNS = ("regret", "regret_of_recompute", "informed", "always", "never", "overrun")
WORST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The truth about an engine and the disks that it is tried with."""

    name: str
    costs: EngineCosts
    block_size: int
    block_nbytes: int
    disks_bytes_per_s: tuple[float, float]
    """The slowest and the fastest."""
    fixed_s: float
    """Of a read."""
    in_flight: int
    """Blocks that the disk works on at once."""
    poll_s: float
    prior_pair: float
    """What a pair of tokens costs by FLOPs, in those of a token: for a model that saw nothing."""


MACHINES = (
    Machine(
        name="cpu",
        costs=EngineCosts(
            step_s=0.02,
            token_s=3.56e-3,
            pair_s=2.84e-6,
            uncertainty=0.0,
            max_step_tokens=8192,
            copy_bytes_per_s=4e9,
        ),
        block_size=128,
        block_nbytes=5_898_240,
        disks_bytes_per_s=(2e6, 1e9),
        fixed_s=1e-3,
        in_flight=3,
        poll_s=0.001,
        prior_pair=2.6e-4,
    ),
    Machine(
        name="gpu",
        costs=EngineCosts(
            step_s=0.01,
            token_s=3e-5,
            pair_s=1e-9,
            uncertainty=0.0,
            max_step_tokens=8192,
            copy_bytes_per_s=2e10,
        ),
        block_size=16,
        block_nbytes=2 << 20,
        disks_bytes_per_s=(3e8, 1.2e10),
        fixed_s=2e-4,
        in_flight=3,
        poll_s=0.0002,
        prior_pair=3.7e-5,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What is simulated once."""

    machine: str
    num_tokens: int
    bytes_per_s: float
    num_memory: int
    """Blocks that are in memory already."""
    num_held: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A point, and what came of it. Shares, but for the times in seconds."""

    point: Point
    reason: Reason
    planned: int
    ready: int
    took_s: float
    best_s: float
    recompute_s: float
    regret: float
    regret_of_recompute: float
    informed: float
    always: float
    never: float
    overrun: float


def points(machine: Machine, options: argparse.Namespace) -> Iterable[Point]:
    """The grid: prompts, disks, whether a third is in memory, how much of the prompt is new."""
    lengths = np.geomspace(256, 7000, options.prompts).astype(int)
    speeds = np.geomspace(*machine.disks_bytes_per_s, options.disks)
    for length, speed, part, new, seed in product(
        lengths, speeds, (0, 3), (0.0, 0.2), range(options.seeds)
    ):
        num_held = max(1, int(length * (1.0 - new)) // machine.block_size)
        yield Point(
            machine=machine.name,
            num_tokens=int(length),
            bytes_per_s=float(speed),
            num_memory=num_held // part if part else 0,
            num_held=num_held,
            seed=seed,
        )


def learn(
    machine: Machine, point: Point, num_observed: int, noise: Callable[[], float]
) -> tuple[EngineCosts, ReadCosts]:
    """What the models know after so many observations of an engine and of a disk."""
    prior = EngineCosts(
        step_s=0.01,
        token_s=1e-4,
        pair_s=1e-4 * machine.prior_pair,
        uncertainty=0.5,
        max_step_tokens=machine.costs.max_step_tokens,
        copy_bytes_per_s=1e10,
    )
    engine, disk = EngineModel(prior), ReadModel()
    tokens = np.geomspace(32, 4096, num_observed).astype(int)
    for new, blocks in zip(tokens, np.geomspace(1, 64, num_observed).astype(int), strict=True):
        pairs = num_pairs(0, int(new))
        seconds = machine.costs.step_s + machine.costs.work_s(int(new), pairs)
        engine.step(int(new), pairs, seconds * noise())
        nbytes = int(blocks) * machine.block_nbytes
        engine.copy(nbytes, machine.costs.copy_s(nbytes) * noise())
        disk.observe(nbytes, (machine.fixed_s + nbytes / point.bytes_per_s) * noise())
    return engine.costs, disk.costs(lag_nbytes=machine.in_flight * machine.block_nbytes)


def simulate(machine: Machine, point: Point, options: argparse.Namespace) -> Result:
    """Learn, plan, execute, and compare with hindsight."""
    rng = random.Random(repr(point))

    def noise() -> float:
        return 1.0 + rng.uniform(-options.noise, options.noise)

    engine, disk = learn(machine, point, options.observations, noise)
    prompt = Prompt(
        num_tokens=point.num_tokens,
        block_size=machine.block_size,
        block_nbytes=machine.block_nbytes,
    )
    held = [
        Held(tier="memory", num_blocks=point.num_memory, costs=None),
        Held(tier="disk", num_blocks=point.num_held, costs=disk),
    ]
    planned = plan(prompt, held, engine)
    engine_noise, disk_noise = noise(), noise()
    true_disk = ReadCosts(fixed_s=machine.fixed_s, bytes_per_s=point.bytes_per_s)

    def load_s(count: int) -> float:
        return true_disk.read_s(max(0, count - point.num_memory) * machine.block_nbytes)

    def prefill_s(count: int) -> float:
        return prompt.prefill_s(machine.costs, count)

    def total_s(count: int) -> float:
        return load_s(count) * disk_noise + prefill_s(count) * engine_noise

    ready_at = [load_s(_together(machine, point, n)) * disk_noise for n in range(point.num_held)]
    waited_s, ready = execute(prompt, engine, planned, (machine.poll_s, ready_at))
    took_s = waited_s + prefill_s(ready) * engine_noise
    ends = (0, point.num_memory, point.num_held)
    best_s, recompute_s = min(map(total_s, ends)), total_s(0)
    informed = min(ends, key=lambda end: load_s(end) + prefill_s(end))
    bound_s = recompute_s + planned.hedge_s + machine.poll_s
    return Result(
        point=point,
        reason=planned.reason,
        planned=planned.num_blocks,
        ready=ready,
        took_s=took_s,
        best_s=best_s,
        recompute_s=recompute_s,
        regret=max(0.0, took_s / best_s - 1.0),
        regret_of_recompute=max(0.0, took_s - best_s) / recompute_s,
        informed=total_s(informed) / best_s - 1.0,
        always=total_s(point.num_held) / best_s - 1.0,
        never=recompute_s / best_s - 1.0,
        overrun=max(0.0, took_s - bound_s) / recompute_s,
    )


def _together(machine: Machine, point: Point, index: int) -> int:
    """Blocks that are read by the time at which block `index` is ready."""
    if index < point.num_memory:
        return point.num_memory
    groups = (index - point.num_memory) // machine.in_flight + 1
    return min(point.num_held, point.num_memory + groups * machine.in_flight)


def execute(
    prompt: Prompt,
    engine: EngineCosts,
    planned: Plan,
    truth: tuple[float, list[float]],
) -> tuple[float, int]:
    """How long a request waits, and how many blocks it has then."""
    poll_s, ready_at = truth
    first = seen = bisect_right(ready_at, 0.0)
    now = moved_at = 0.0
    while True:
        ready = bisect_right(ready_at, now, hi=planned.num_blocks)
        if ready > seen:
            seen, moved_at = ready, now
        share = (planned.num_blocks - ready) / max(1, planned.num_blocks - first)
        wait = Wait(
            ready=ready,
            planned=planned.num_blocks,
            waited_s=now,
            left_s=max(0.0, share * planned.load_s - (now - moved_at)),
            hedge_s=planned.hedge_s,
        )
        if not may_wait(prompt, engine, wait):
            return now, ready
        now += max(poll_s, now / 1000.0)


def summary(results: list[Result]) -> dict[str, float]:
    """Mean, 95th percentile and most of every column."""
    figures: dict[str, float] = {"points": len(results)}
    for column in COLUMNS:
        values = np.array([getattr(result, column) for result in results])
        figures[f"{column}_mean"] = float(values.mean())
        figures[f"{column}_p95"] = float(np.quantile(values, 0.95))
        figures[f"{column}_max"] = float(values.max())
    return figures


def groups(results: list[Result]) -> dict[str, list[Result]]:
    """All, and by machine, reason and length of the prompt."""
    grouped: dict[str, list[Result]] = {}
    for result in results:
        machine, tokens = result.point.machine, result.point.num_tokens
        for name in (machine, f"{machine} {result.reason}", f"{machine} {tokens:5} tokens"):
            grouped.setdefault(name, []).append(result)
    return {"all": results} | dict(sorted(grouped.items()))


def main() -> None:
    """Run as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--disks", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--observations", type=int, default=8)
    options = parser.parse_args()
    results = [
        simulate(machine, point, options)
        for machine in MACHINES
        for point in points(machine, options)
    ]
    table = {name: summary(some) for name, some in groups(results).items()}
    worst = sorted(results, key=lambda result: -result.regret)[:WORST]
    document = {
        "schema": "headstart.bench.planner_regret/1",
        "environment": describe(),
        "settings": {key: value for key, value in vars(options).items() if key != "json"},
        "machines": [asdict(machine) for machine in MACHINES],
        "summary": table,
        "worst": [asdict(result) for result in worst],
    }
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{'mean/p95 in %':18}{'points':>7}" + "".join(f"{c[:16]:>17}" for c in COLUMNS))
    for name, figures in table.items():
        cells = (f"{figures[f'{c}_mean']:.2%} {figures[f'{c}_p95']:.1%}" for c in COLUMNS)
        print(f"{name:18}{figures['points']:7}" + "".join(f"{cell:>17}" for cell in cells))


if __name__ == "__main__":
    main()
