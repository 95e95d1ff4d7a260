"""TTFT on vLLM with a slow disk: no cache, Headstart's plan, and loading whatever is held.

    .venv-vllm/bin/python benchmarks/vllm_slow_disk.py --bytes-per-s 5000000 \
        --json benchmarks/results/vllm_slow_disk_5.json

SmolLM2-135M in float32, computing on one core. Every prompt is stored once, on disk only: the node
is restarted before each arm, in a cgroup whose reads are throttled by the kernel
(`blkio.throttle.read_bps_device`, for the superuser). The arms are asked in turn, prompt by prompt,
each in its own engine, in an order that rotates; a prompt is asked once an arm, so that no hit
comes from memory:

    plain     no connector             plain again   another such engine, for the A/A spread
    planned   `"load": "planned"`      always        `"load": "always"`, if --always is given

Every answer is compared. Engines wait while another one computes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from headstart.bench.environment import describe
from headstart.bench.vllm import VllmServer, serving
from headstart.config import cache_dir, engine_environment
from headstart.engines.smollm2 import prepare_model
from headstart.engines.vllm.command import server_words

LENGTHS = (256, 1024, 2048)
_PAUSE_S = 2.0
"""For what another engine and its node have still to do: they share the core."""
_CGROUP = Path("/sys/fs/cgroup/blkio/headstart-bench")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--bytes-per-s", type=int, default=0, help="of the disk; 0: as it is")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--always", action="store_true")
    parser.add_argument("--root", type=Path, default=Path("build"), help="folder on the disk")
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.root, prefix="slow-disk-") as folder:
        document = _Campaign(options, Path(folder).absolute()).run()
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    _show(document)
    if not document["identical"]:
        sys.exit("an answer differs")


class _Campaign:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._model = prepare_model(cache_dir(), "float32")
        rng = random.Random(11)
        self._prompts = [
            [rng.randrange(100, 40_000) for _ in range(length)]
            for _ in range(options.pairs)
            for length in options.lengths
        ]
        self._arms = ["plain", "planned", *(["always"] if options.always else []), "plain again"]

    def run(self) -> dict[str, object]:
        ttft: dict[str, dict[str, list[float]]] = {
            arm: {str(length): [] for length in self._options.lengths} for arm in self._arms
        }
        answers: dict[int, set[tuple[int, ...]]] = {}
        with ExitStack() as stack:
            # Each arm has a node of its own on a disk of its own, filled alike.
            engines: dict[str, VllmServer] = {}
            stored = [arm for arm in self._arms if arm in ("planned", "always")]
            for arm in self._arms:
                if arm in stored:
                    stack.enter_context(self._node(arm, 0))
                engines[arm] = stack.enter_context(self._engine(arm))
            for number, prompt in enumerate(self._prompts):
                for arm in stored:
                    answers.setdefault(number, set()).add(engines[arm].ask(prompt).tokens)
            with ExitStack() as throttled:
                for arm in stored:
                    self._headstart("node", "stop", "--socket", str(self._socket(arm)))
                    throttled.enter_context(self._node(arm, self._options.bytes_per_s))
                _drop_caches()
                time.sleep(35.0)  # the engines ask again after at most half a minute
                for arm in stored:
                    engines[arm].ask([100] * 64)
                for number, prompt in enumerate(self._prompts):
                    first = number // len(self._options.lengths) % len(self._arms)
                    for arm in self._arms[first:] + self._arms[:first]:
                        time.sleep(_PAUSE_S)
                        engines[arm].reset_prefix_cache()
                        reply = engines[arm].ask(prompt)
                        answers[number].add(reply.tokens)
                        ttft[arm][str(len(prompt))].append(reply.ttft_s)
                    told = {arm: round(t[str(len(prompt))][-1], 3) for arm, t in ttft.items()}
                    print(len(prompt), told, flush=True)
                decisions = self._decisions()
        return {
            "schema": "headstart.bench.vllm_slow_disk/1",
            "environment": describe(),
            "settings": {
                "bytes_per_s": self._options.bytes_per_s,
                "pairs": self._options.pairs,
                "dtype": "float32",
            },
            "identical": all(len(each) == 1 for each in answers.values()),
            "ttft_s": ttft,
            "ratios": _ratios(ttft),
            "decisions": decisions,
        }

    def _decisions(self) -> list[object]:
        words = ("node", "decisions", "--socket", str(self._socket("planned")), "--json", "-")
        return [json.loads(line) for line in self._headstart(*words).splitlines()]

    def _socket(self, arm: str) -> Path:
        return self._folder / f"{arm}.sock"

    @contextmanager
    def _engine(self, arm: str) -> Iterator[VllmServer]:
        arguments = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "8192"]
        arguments += ["--block-size", "128", "--enable-prompt-tokens-details"]
        if arm in ("planned", "always"):
            transfer = {
                "kv_connector": "HeadstartConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "node": str(self._socket(arm)),
                    "load": arm,
                    "max_wait": "10min",
                    "stall": "10min" if arm == "always" else 0.5,
                },
            }
            arguments += ["--kv-transfer-config", json.dumps(transfer)]
            arguments += ["--prefix-caching-hash-algo", "sha256_cbor"]
        command = [*server_words(str(self._model)), *arguments]
        log = self._folder.parent / f"slow-disk-{arm}.log"
        with serving(command, environ=engine_environment(), log=log) as engine:
            engine.ask([100] * 64, max_tokens=4)  # the first request warms the engine up
            yield engine

    @contextmanager
    def _node(self, arm: str, bytes_per_s: int) -> Iterator[None]:
        config = self._folder / f"{arm}.toml"
        config.write_text(
            f'[memory]\ncapacity = "1GiB"\n[node]\nsocket = "{self._socket(arm)}"\n'
            f'metrics_port = 0\n[[tiers]]\nkind = "file"\nroot = "{self._folder / arm}"\n'
            'capacity = "6GiB"\n'
        )
        words = [str(Path(sys.executable).parent / "headstart"), "node", "run", "--config"]
        log = (self._folder.parent / f"slow-disk-{arm}-node.log").open("ab")
        process = subprocess.Popen([*words, str(config)], stdout=subprocess.PIPE, stderr=log)
        with contextlib.ExitStack() as stack:
            stack.callback(process.wait)
            stack.callback(process.terminate)
            if bytes_per_s:
                _throttle(process.pid, self._folder, bytes_per_s)
            assert process.stdout is not None
            if not process.stdout.readline():
                sys.exit(f"the node of {arm} does not start; see {log.name}")
            yield

    def _headstart(self, *words: str) -> str:
        program = str(Path(sys.executable).parent / "headstart")
        return subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout


def _throttle(pid: int, folder: Path, bytes_per_s: int) -> None:
    """Bound the reads of a process from the device that a folder is on."""
    device = folder.stat().st_dev
    _CGROUP.mkdir(exist_ok=True)
    numbers = f"{os.major(device)}:{os.minor(device)}"
    (_CGROUP / "blkio.throttle.read_bps_device").write_text(f"{numbers} {bytes_per_s}")
    (_CGROUP / "cgroup.procs").write_text(str(pid))


def _drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def _ratios(ttft: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """TTFT against that of no cache, pair by pair: median and worst, by arm and length."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for arm, by_length in ttft.items():
        if arm == "plain":
            continue
        found[arm] = {}
        for length, times in by_length.items():
            plain, again = ttft["plain"][length], ttft["plain again"][length]
            # Both of a pair's plain ones, or for the A/A spread each against the other.
            base = plain if arm == "plain again" else list(map(_mean, plain, again))
            ratios = [time / one for time, one in zip(times, base, strict=True)]
            excess = [time - one for time, one in zip(times, base, strict=True)]
            found[arm][length] = {
                "p50": median(ratios),
                "best": min(ratios),
                "worst": max(ratios),
                "worst_excess_s": max(excess),
            }
    return found


def _mean(one: float, other: float) -> float:
    return (one + other) / 2


def _show(document: dict[str, object]) -> None:
    ratios: dict[str, dict[str, dict[str, float]]] = document["ratios"]  # type: ignore[assignment]
    ttft: dict[str, dict[str, Sequence[float]]] = document["ttft_s"]  # type: ignore[assignment]
    for arm, by_length in ratios.items():
        for length, each in by_length.items():
            print(
                f"{arm:12} {length:>6}: {median(ttft[arm][length]):7.3f} s against "
                f"{median(ttft['plain'][length]):7.3f} s, p50 {each['p50']:.3f}, "
                f"worst {each['worst']:.3f} ({each['worst_excess_s'] * 1000:+.0f} ms)"
            )


if __name__ == "__main__":
    main()
