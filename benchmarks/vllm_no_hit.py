"""What Headstart costs when nothing hits: TTFT and output tokens a second, with and without it.

    .venv-vllm/bin/python benchmarks/vllm_no_hit.py --json benchmarks/results/vllm_no_hit.json

Two engines run side by side, one with Headstart (storing everything on the disk), one without; only
one is asked at a time. A round asks plain, headstart and plain again, each with eight prompts at
once that nobody has seen, the same for all three; the order turns round by round. So each round
gives one ratio headstart/plain and one plain/plain, whose spread is what this machine's noise is.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median

from headstart.bench.environment import describe
from headstart.bench.vllm import VllmServer, serving
from headstart.config import cache_dir, engine_environment
from headstart.engines.smollm2 import prepare_model
from headstart.engines.vllm.command import headstart_arguments, server_words

VOCABULARY = 40_000


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--min-tokens", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--root", type=Path, default=Path("build"))
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.root, prefix="vllm-no-hit-") as name:
        rounds, counters = run(options, Path(name).absolute())
    document = {
        "schema": "headstart.bench.vllm_no_hit/1",
        "environment": describe(),
        "settings": {key: str(value) for key, value in vars(options).items() if key != "json"},
        "rounds": rounds,
        "headstart": counters,
        "ratios": {
            figure: {
                "headstart/plain": summary(
                    [r["headstart"][figure] / both(r, figure) for r in rounds]
                ),
                "plain/plain": summary([r["plain"][figure] / r["again"][figure] for r in rounds]),
            }
            for figure in ("ttft_s", "output_tokens_per_s")
        },
    }
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    for figure, ratios in document["ratios"].items():
        for pair, ratio in ratios.items():
            numbers = ", ".join(f"{name} {value:.4f}" for name, value in ratio.items())
            print(f"{figure:20} {pair:16} {numbers}")


def run(options: argparse.Namespace, folder: Path) -> tuple[list[dict], dict[str, float]]:
    """The figures of each round, and what Headstart counted."""
    model = prepare_model(cache_dir(), "float32")
    config, socket = folder / "headstart.toml", folder / "node.sock"
    config.write_text(
        f'[memory]\ncapacity = "2GiB"\n[node]\nsocket = "{socket}"\nmetrics_port = 0\n'
        f'[[tiers]]\nkind = "file"\nroot = "{folder / "blocks"}"\ncapacity = "8GiB"\n'
    )
    common = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"]
    common += ["--block-size", "128"]
    rng = random.Random(11)
    program = Path(sys.executable).parent / "headstart"
    subprocess.run([program, "node", "start", "--config", config], check=True)
    try:
        with ExitStack() as stack:
            engines = {
                arm: stack.enter_context(
                    serving(
                        [*server_words(str(model)), *arguments],
                        environ=engine_environment(),
                        log=folder / f"{arm}.log",
                    )
                )
                for arm, arguments in (
                    ("plain", common),
                    ("headstart", headstart_arguments(common, config=config)),
                )
            }
            for engine in engines.values():
                burst(engine, [[rng.randrange(100, VOCABULARY) for _ in range(200)]] * 2, 4)
            rounds = []
            for number in range(options.rounds):
                lengths = [
                    rng.randint(options.min_tokens, options.max_tokens)
                    for _ in range(options.concurrency)
                ]
                figures = {}
                order = ["plain", "headstart", "again"]
                for arm in order if number % 2 == 0 else order[::-1]:
                    # The same lengths with other tokens: nothing is known to anybody.
                    prompts = [[rng.randrange(100, VOCABULARY) for _ in range(n)] for n in lengths]
                    engine = engines["headstart" if arm == "headstart" else "plain"]
                    figures[arm] = burst(engine, prompts, options.output_tokens)
                rounds.append(figures)
                print(
                    number, {arm: round(f["ttft_s"], 3) for arm, f in figures.items()}, flush=True
                )
            return rounds, engines["headstart"].counters("headstart:")
    finally:
        subprocess.run([program, "node", "stop", "--socket", socket], check=True)


def burst(engine: VllmServer, prompts: list[list[int]], output_tokens: int) -> dict[str, float]:
    """Ask all prompts at once; mean TTFT and output tokens a second."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(lambda p: engine.ask(p, max_tokens=output_tokens), prompts))
    seconds = time.perf_counter() - started
    return {
        "ttft_s": mean(reply.ttft_s for reply in replies),
        "output_tokens_per_s": sum(len(reply.tokens) for reply in replies) / seconds,
        "seconds": seconds,
    }


def both(figures: dict[str, dict[str, float]], figure: str) -> float:
    """The mean of the two plain bursts of a round."""
    return (figures["plain"][figure] + figures["again"][figure]) / 2


def summary(ratios: list[float]) -> dict[str, float]:
    """Median and extremes."""
    return {"median": median(ratios), "min": min(ratios), "max": max(ratios)}


if __name__ == "__main__":
    main()
