"""How far the planner is from the best choice in hindsight, simulated.

    python benchmarks/planner_regret.py --json benchmarks/results/planner_regret.json

A point is an engine, a prompt, how much of it is held and where, a disk's speed and a seed. Both
cost models are fitted to a few noisy observations. Then a request is planned and executed, asking
`may_wait` at every poll, while its engine and its disk are off by noise of their own. The disk
works on several blocks at once, which are ready together.

`regret` is by how much the best of loading all, nothing, or what memory has would have been faster,
as a share of its time, `of_recompute` as a share of the time without any load. `always` and `never`
are the regrets of loading all and nothing, `informed` that of who knows all costs but not the
noise, and has no bound. `overrun` is what a first token came later than the bound (recompute_s +
hedge_s + a poll), as a share of recompute_s: the engine was off by more than its model says.
`hard` points are those where loading takes half to twice of what it saves.
"""

from __future__ import annotations

import argparse
import json
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from headstart.bench.environment import describe
from headstart.costs import EngineCosts, EngineModel, ReadCosts, ReadModel, num_pairs
from headstart.planner import Held, Plan, Progress, Prompt, Wait, may_wait, plan

COLUMNS = ("regret", "of_recompute", "informed", "always", "never", "overrun")
TOKENS = (256, 7000)
IN_FLIGHT = 3
"""Blocks that a disk works on at once."""


def costs(
    step_s: float, token_s: float, pair_s: float, copy_bytes_per_s: float, uncertainty: float = 0.0
) -> EngineCosts:
    """An engine's, all prompts in one step."""
    return EngineCosts(
        step_s=step_s,
        token_s=token_s,
        pair_s=pair_s,
        uncertainty=uncertainty,
        max_step_tokens=8192,
        copy_bytes_per_s=copy_bytes_per_s,
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """The truth about an engine and the disks that it is tried with."""

    name: str
    engine: EngineCosts
    prior: EngineCosts
    """By FLOPs, of a faster machine."""
    block_size: int
    block_nbytes: int
    disks_bytes_per_s: tuple[float, float]
    """The slowest and the fastest."""
    fixed_s: float
    """Of a read."""
    poll_s: float


CPU = costs(0.02, 3.56e-3, 2.84e-6, 4e9)
CPU_PRIOR = costs(1e-3, 9e-4, 2.3e-7, 4e9, 0.5)
GPU = costs(0.01, 3e-5, 1e-9, 2e10)
GPU_PRIOR = costs(1e-3, 1.4e-5, 5.2e-10, 4e9, 0.5)
MACHINES = (
    Machine("cpu", CPU, CPU_PRIOR, 128, 5_898_240, (2e6, 1e9), 1e-3, 1e-3),
    Machine("gpu", GPU, GPU_PRIOR, 16, 2 << 20, (3e8, 1.2e10), 2e-4, 2e-4),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What is simulated once."""

    num_tokens: int
    bytes_per_s: float
    num_memory: int
    """Blocks that are in memory already."""
    num_held: int


def draw(machine: Machine, rng: random.Random) -> Point:
    """Any prompt, all or four fifths of it held, and of those none or a third in memory."""

    def between(low: float, high: float) -> float:
        return low * (high / low) ** rng.random()

    num_tokens = int(between(*TOKENS))
    num_held = int(num_tokens * rng.choice((1.0, 0.8))) // machine.block_size
    return Point(
        num_tokens=num_tokens,
        bytes_per_s=between(*machine.disks_bytes_per_s),
        num_memory=rng.choice((0, num_held // 3)),
        num_held=num_held,
    )


def learn(
    machine: Machine, bytes_per_s: float, num_observed: int, noise: Callable[[], float]
) -> tuple[EngineCosts, ReadCosts]:
    """What the models know after so many observations of an engine and of a disk."""
    truth, engine, disk = machine.engine, EngineModel(machine.prior), ReadModel()
    for tokens, blocks in np.geomspace((32, 1), (4096, 64), num_observed).astype(int).tolist():
        nbytes = blocks * machine.block_nbytes
        engine.step(tokens, num_pairs(0, tokens), truth.prefill_s(0, tokens) * noise())
        engine.copy(nbytes, truth.copy_s(nbytes) * noise())
        disk.observe(nbytes, (machine.fixed_s + nbytes / bytes_per_s) * noise())
    return engine.costs, disk.costs(lag_nbytes=IN_FLIGHT * machine.block_nbytes)


def simulate(machine: Machine, seed: int, options: argparse.Namespace) -> dict[str, object]:
    """Draw a point, learn, plan, execute, and compare with hindsight."""
    rng = random.Random(f"{machine.name}/{seed}")
    point = draw(machine, rng)

    def noise() -> float:
        return 1.0 + rng.uniform(-options.noise, options.noise)

    engine, disk = learn(machine, point.bytes_per_s, options.observations, noise)
    size, nbytes = machine.block_size, machine.block_nbytes
    prompt = Prompt(num_tokens=point.num_tokens, block_size=size, block_nbytes=nbytes)
    in_memory = Held(tier="memory", num_blocks=point.num_memory, costs=None)
    on_disk = Held(tier="disk", num_blocks=point.num_held, costs=disk)
    planned = plan(prompt, [in_memory, on_disk], engine)
    engine_noise, disk_noise = noise(), noise()
    true = ReadCosts(fixed_s=machine.fixed_s, bytes_per_s=point.bytes_per_s)

    def load_s(count: int) -> float:
        return true.read_s(max(0, count - point.num_memory) * nbytes)

    def prefill_s(count: int) -> float:
        return prompt.prefill_s(machine.engine, count)

    def total_s(count: int) -> float:
        return load_s(count) * disk_noise + prefill_s(count) * engine_noise

    def ready_at(index: int) -> float:
        group = (index - point.num_memory) // IN_FLIGHT + 1
        return load_s(min(point.num_held, point.num_memory + group * IN_FLIGHT)) * disk_noise

    times = [ready_at(index) for index in range(point.num_held)]
    waited_s, ready = execute(prompt, engine, planned, times, machine.poll_s)
    took_s = waited_s + prefill_s(ready) * engine_noise
    ends = (0, point.num_memory, point.num_held)
    informed = min(ends, key=lambda end: load_s(end) + prefill_s(end))
    best_s, recompute_s = min(map(total_s, ends)), total_s(0)
    late_s = took_s - recompute_s - planned.hedge_s - machine.poll_s
    ratio = load_s(point.num_held) / (prefill_s(point.num_memory) - prefill_s(point.num_held))
    return {
        "machine": machine.name,
        **asdict(point),
        "reason": planned.reason,
        "planned": planned.num_blocks,
        "ready": ready,
        "load_to_gain": ratio,
        "took_s": took_s,
        "best_s": best_s,
        "recompute_s": recompute_s,
        "regret": max(0.0, took_s / best_s - 1.0),
        "of_recompute": max(0.0, took_s - best_s) / recompute_s,
        "informed": total_s(informed) / best_s - 1.0,
        "always": total_s(point.num_held) / best_s - 1.0,
        "never": recompute_s / best_s - 1.0,
        "overrun": max(0.0, late_s) / recompute_s,
    }


def execute(
    prompt: Prompt, engine: EngineCosts, planned: Plan, ready_at: list[float], poll_s: float
) -> tuple[float, int]:
    """How long a request waits, and how many blocks it has then; what is left as engines say it."""
    first, now = bisect_right(ready_at, 0.0), 0.0
    while True:
        ready = bisect_right(ready_at, now, hi=planned.num_blocks)
        progress = Progress(
            planned=planned.num_blocks,
            at_start=first,
            ready=ready,
            load_s=planned.load_s,
            elapsed_s=now,
            moved_s=ready_at[ready - 1] if ready > first else 0.0,
        )
        wait = Wait(
            ready=ready,
            planned=planned.num_blocks,
            waited_s=now,
            left_s=progress.left_s,
            hedge_s=planned.hedge_s,
        )
        if not may_wait(prompt, engine, wait):
            return now, ready
        now += max(poll_s, now / 1000.0)


def summary(results: list[dict]) -> dict[str, float]:
    """Mean, 95th percentile and most of every column."""
    figures: dict[str, float] = {"points": len(results)}
    for column in COLUMNS:
        values = np.array([result[column] for result in results])
        figures[f"{column}_mean"] = float(values.mean())
        figures[f"{column}_p95"] = float(np.quantile(values, 0.95))
        figures[f"{column}_max"] = float(values.max())
    return figures


def groups(results: list[dict]) -> dict[str, list[dict]]:
    """All, and by machine, reason, length of the prompt, and whether it was hard."""
    grouped: dict[str, list[dict]] = {}
    for result in results:
        kinds = ["", str(result["reason"]), f"<{1 << result['num_tokens'].bit_length():5} tokens"]
        kinds += ["hard"] if 0.5 <= result["load_to_gain"] <= 2.0 else []
        for kind in kinds:
            grouped.setdefault(f"{result['machine']} {kind}", []).append(result)
    return {"all": results} | dict(sorted(grouped.items()))


def main() -> None:
    """Run as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--points", type=int, default=1000, help="on each machine")
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--observations", type=int, default=8)
    options = parser.parse_args()
    results = [simulate(m, seed, options) for m in MACHINES for seed in range(options.points)]
    table = {name: summary(some) for name, some in groups(results).items()}
    document = {
        "schema": "headstart.bench.planner_regret/1",
        "environment": describe(),
        "settings": {key: value for key, value in vars(options).items() if key != "json"},
        "machines": [asdict(machine) for machine in MACHINES],
        "summary": table,
        "worst": sorted(results, key=lambda result: -result["regret"])[:10],
    }
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{'mean, p95':18}{'points':>7}" + "".join(f"{column:>17}" for column in COLUMNS))
    for name, figures in table.items():
        cells = (f"{figures[f'{c}_mean']:.2%} {figures[f'{c}_p95']:.1%}" for c in COLUMNS)
        print(f"{name:18}{figures['points']:7}" + "".join(f"{cell:>17}" for cell in cells))


if __name__ == "__main__":
    main()
