"""TTFT on vLLM: recomputed, the engine's own hit, memory hit, and after a restart of everything.

    .venv-vllm/bin/python benchmarks/vllm_restart.py --json benchmarks/results/vllm_restart.json

Two engines, one after the other, SmolLM2-135M in float32, computing on one core:

    plain      no connector: each prompt computed (recompute), then asked again (own hit)
    headstart  each prompt computed and stored (cold), again (own hit), again with the engine's
               cache emptied (memory hit)
    restarted  engine and node ended, page cache dropped, both started again: each prompt (restart)
               and again (own hit)
    rounds     with the restarted engine, in turn: the first prompt of each length as own hit, as
               memory hit (the engine's cache emptied), and as file hit (the node restarted, too)

Every answer is compared with the recomputed one. Beside it the raw read rate of the disk, by direct
reads of the same slab files in the same run: what a hit may cost over the engine's own is judged
against it, by the medians of the rounds' differences.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from headstart.bench.environment import describe
from headstart.bench.vllm import Reply, VllmServer, serving
from headstart.config import cache_dir, engine_environment
from headstart.engines.smollm2 import prepare_model
from headstart.engines.vllm.command import headstart_arguments, server_words

LENGTHS = (1024, 2048, 4096, 7000)
VOCABULARY = 40_000


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--prompts", type=int, default=3, help="prompts of each length")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--root", type=Path, default=Path("build"), help="folder on the disk")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-tokens", type=int, default=4)
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.root, prefix="vllm-restart-") as folder:
        document = _Campaign(options, Path(folder).absolute()).run()
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    _show(document)
    if not document["identical"]:
        sys.exit("an answer differs")


class _Campaign:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._model = prepare_model(cache_dir(), "float32")
        rng = random.Random(7)
        self._prompts = {
            length: [
                [rng.randrange(100, VOCABULARY) for _ in range(length)]
                for _ in range(options.prompts)
            ]
            for length in options.lengths
        }
        self._config = folder / "headstart.toml"
        self._socket = folder / "node.sock"
        self._config.write_text(
            f'[memory]\ncapacity = "3GiB"\n[node]\nsocket = "{self._socket}"\nmetrics_port = 0\n'
            f'[[tiers]]\nkind = "file"\nroot = "{folder / "blocks"}"\ncapacity = "6GiB"\n'
        )
        self._answers: dict[str, dict[int, list[Reply]]] = {}

    def run(self) -> dict[str, object]:
        with self._engine("plain") as engine:
            self._ask(engine, "recompute")
            self._ask(engine, "own hit, plain")
        with self._node(), self._engine("headstart") as engine:
            self._ask(engine, "cold")
            self._ask(engine, "own hit")
            engine.reset_prefix_cache()
            self._ask(engine, "memory")
        self._headstart("node", "start", "--config", str(self._config))
        try:
            with self._engine("headstart") as engine:
                _drop_caches()
                raw = _raw_read_rate(self._folder / "blocks" / "slabs")
                _drop_caches()
                self._ask(engine, "restart")
                self._ask(engine, "own hit after restart")
                rounds = [self._round(engine) for _ in range(self._options.rounds)]
            status = self._headstart("node", "status", "--socket", str(self._socket), "--json", "-")
        finally:
            self._headstart("node", "stop", "--socket", str(self._socket))
        block_nbytes = _block_nbytes(json.loads(status))
        reference = self._answers["recompute"]
        identical = all(
            reply.tokens == reference[length][index].tokens
            for phase in self._answers.values()
            for length, replies in phase.items()
            for index, reply in enumerate(replies)
        )
        return {
            "schema": "headstart.bench.vllm_restart/1",
            "environment": describe(),
            "settings": {"dtype": self._options.dtype, "prompts": self._options.prompts},
            "identical": identical,
            "raw_read_bytes_per_s": raw,
            "block_nbytes": block_nbytes,
            "rounds_ttft_s": rounds,
            "added_to_own_hit_s": self._added(rounds, raw, block_nbytes),
            "ttft_s": {
                phase: {str(n): [r.ttft_s for r in replies] for n, replies in answers.items()}
                for phase, answers in self._answers.items()
            },
            "cached_tokens": {
                phase: {
                    str(n): [r.cached_tokens for r in replies] for n, replies in answers.items()
                }
                for phase, answers in self._answers.items()
            },
        }

    def _ask(self, engine: VllmServer, phase: str) -> None:
        self._answers[phase] = {}
        for length, prompts in self._prompts.items():
            replies = []
            for prompt in prompts:
                replies.append(engine.ask(prompt, max_tokens=self._options.max_tokens))
                print(f"{phase}, {length} tokens: {replies[-1].ttft_s:.3f} s", flush=True)
                time.sleep(0.2)
            self._answers[phase][length] = replies

    def _round(self, engine: VllmServer) -> dict[str, dict[str, float]]:
        """TTFT of the first prompt of each length, by where its KV comes from."""
        figures: dict[str, dict[str, float]] = {"own": {}, "memory": {}, "file": {}}
        for length, prompts in self._prompts.items():
            for whence in figures:
                if whence == "own":  # the length before has emptied the engine's cache
                    engine.ask(prompts[0], max_tokens=self._options.max_tokens)
                else:
                    engine.reset_prefix_cache()
                if whence == "file":
                    self._headstart("node", "stop", "--socket", str(self._socket))
                    self._headstart("node", "start", "--config", str(self._config))
                    _drop_caches()
                    # The engine finds the new node with the next request after its pause.
                    time.sleep(1.5)
                    engine.ask([length % 100 + 100] * 300, max_tokens=2)
                reply = engine.ask(prompts[0], max_tokens=self._options.max_tokens)
                expected = self._answers["recompute"][length][0].tokens
                if reply.tokens != expected:
                    sys.exit(f"{whence}, {length} tokens: another answer")
                if reply.cached_tokens < length // 128 * 128 - 128:
                    sys.exit(f"{whence}, {length} tokens: only {reply.cached_tokens} from a cache")
                figures[whence][str(length)] = reply.ttft_s
        print({whence: {n: round(s, 3) for n, s in f.items()} for whence, f in figures.items()})
        return figures

    def _added(
        self, rounds: list[dict[str, dict[str, float]]], raw: float, block_nbytes: int
    ) -> dict[str, dict[str, float]]:
        """What a hit costs over the engine's own, and what it may cost."""
        added = {}
        for length in self._options.lengths:
            nbytes = length // 128 * block_nbytes
            difference = {
                whence: median(r[whence][str(length)] - r["own"][str(length)] for r in rounds)
                for whence in ("memory", "file")
            }
            allowed = nbytes / raw * 1.3 + 0.015
            added[str(length)] = {**difference, "file_allowed": allowed, "nbytes": nbytes}
        return added

    @contextmanager
    def _engine(self, arm: str) -> Iterator[VllmServer]:
        arguments = ["--dtype", self._options.dtype, "--enforce-eager", "--max-model-len", "8192"]
        arguments += ["--block-size", "128", "--enable-prompt-tokens-details"]
        if arm != "plain":
            arguments = headstart_arguments(arguments, config=self._config)
        command = [*server_words(str(self._model)), *arguments]
        log = self._folder / f"{arm}.log"
        with serving(command, environ=engine_environment(), log=log) as engine:
            engine.ask([100] * 64, max_tokens=4)  # the first request warms the engine up
            yield engine

    @contextmanager
    def _node(self) -> Iterator[None]:
        self._headstart("node", "start", "--config", str(self._config))
        try:
            yield
        finally:
            self._headstart("node", "stop", "--socket", str(self._socket))

    def _headstart(self, *words: str) -> str:
        program = str(Path(sys.executable).parent / "headstart")
        return subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout


def _drop_caches() -> None:
    """Forget the page cache, so that reads come from the device; needs the superuser."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        print(f"the page cache stays: {error.strerror}", file=sys.stderr)


def _raw_read_rate(slabs: Path) -> float:
    """Bytes per second of `dd` with direct reads of the slab files, the best of three."""
    paths = sorted(slabs.glob("*.slab"))
    rates = []
    for _ in range(3):
        started, nbytes = time.perf_counter(), 0
        readers = [
            subprocess.Popen(
                ["dd", f"if={path}", "of=/dev/null", "bs=4M", "iflag=direct", "count=64"],
                stderr=subprocess.DEVNULL,
            )
            for path in paths[:4]
        ]
        for reader in readers:
            reader.wait()
        nbytes = sum(min(path.stat().st_size, 256 << 20) for path in paths[:4])
        rates.append(nbytes / (time.perf_counter() - started))
    return max(rates)


def _block_nbytes(status: dict[str, dict[str, dict[str, int]]]) -> int:
    memory = status["tiers"]["memory"]
    return memory["used_nbytes"] // max(1, memory["num_blocks"])


def _show(document: dict[str, object]) -> None:
    ttft: dict[str, dict[str, Sequence[float]]] = document["ttft_s"]  # type: ignore[assignment]
    lengths = list(ttft["recompute"])
    print(f"{'TTFT in s, median':24}" + "".join(f"{length:>10}" for length in lengths))
    for phase, answers in ttft.items():
        print(f"{phase:24}" + "".join(f"{median(answers[n]):10.3f}" for n in lengths))
    for whence in ("memory", "file", "file_allowed"):
        added = document["added_to_own_hit_s"]
        print(f"{'added, ' + whence:24}" + "".join(f"{added[n][whence]:10.3f}" for n in lengths))
    ratios = [median(ttft["recompute"][n]) / median(ttft["restart"][n]) for n in lengths]
    print(f"{'recompute / restart':24}" + "".join(f"{ratio:10.1f}" for ratio in ratios))


if __name__ == "__main__":
    main()
