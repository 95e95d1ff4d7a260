"""TTFT on vLLM with a slow disk: no cache, Headstart's plan, and loading whatever is held.

    .venv-vllm/bin/python benchmarks/vllm_slow_disk.py --bytes-per-s 0 20000000 8000000 5000000 \
        --lengths 256 1024 2048x3 --always --sick drop stall crowd short \
        --json benchmarks/results/vllm_slow_disk.json

SmolLM2-135M in float32, computing on one core. Every prompt is stored once, on disk only. Then, for
each speed, the nodes are started anew in a cgroup whose reads the kernel throttles
(`blkio.throttle.read_bps_device`, for the superuser; 0: the disk as it is), and the arms are asked
in turn, prompt by prompt, each in its own engine, in an order that rotates:

    plain     no connector             plain again   another such engine, for the A/A spread
    planned   `"load": "planned"`      always        `"load": "always"`, with --always

With --sick: "drop", a disk that falls from its speed to 2 MB/s and comes back; "stall",
one that gives nothing for 20 s; "crowd", eight requests at once on a slow one; "short", prompts of
one or two blocks hit in memory. Every answer is compared. Engines wait while another one computes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from operator import truediv
from pathlib import Path
from statistics import fmean, median

from headstart.bench.environment import describe
from headstart.bench.vllm import VllmServer, serving
from headstart.config import cache_dir, engine_environment
from headstart.engines.smollm2 import prepare_model
from headstart.engines.vllm.command import server_words

LENGTHS = ((256, None), (1024, None), (2048, None))
_PAUSE_S = 2.0
"""For what another engine and its node have still to do: they share the core."""
_CGROUPS = Path("/sys/fs/cgroup/blkio")
_SICK_LENGTH = 1024
_NUM_SICK = 20
_NUM_CROWD = 8
_SHORT = (200, 300)
_NUM_SHORT = 6
_DROP_BYTES_PER_S = 2_000_000
_CROWD_BYTES_PER_S = 8_000_000
_STALL_S = 20.0


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--bytes-per-s", type=int, nargs="*", default=[0], help="of the disk; 0: as it is"
    )
    parser.add_argument(
        "--lengths", type=_length, nargs="*", default=LENGTHS, help="TOKENS[xPAIRS], each"
    )
    parser.add_argument("--pairs", type=int, default=10, help="for lengths that do not say")
    parser.add_argument("--always", action="store_true")
    parser.add_argument(
        "--sick", nargs="*", choices=("drop", "stall", "crowd", "short"), default=()
    )
    parser.add_argument("--crowd-length", type=int, default=_SICK_LENGTH)
    parser.add_argument("--root", type=Path, default=Path("build"), help="folder on the disk")
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(dir=options.root, prefix="slow-disk-")
        )
        document = _Campaign(options, Path(folder).absolute(), stack).run()
    if not document["identical"]:
        sys.exit("an answer differs")


class _Campaign:
    def __init__(self, options: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        self._options, self._folder, self._stack = options, folder, stack
        self._model = prepare_model(cache_dir(), "float32")
        self._rng = random.Random(11)
        self._arms = ["plain", "planned", *(["always"] if options.always else []), "plain again"]
        self._stored = [arm for arm in self._arms if arm in ("planned", "always")]
        self._engines: dict[str, VllmServer] = {}
        self._nodes: dict[str, ExitStack] = {}
        self._answers: dict[tuple[int, ...], set[tuple[int, ...]]] = {}

    def run(self) -> dict[str, object]:
        pairs = {
            length: self._options.pairs if pairs is None else pairs
            for length, pairs in self._options.lengths
        }
        prompts = [
            self._prompt(length)
            for number in range(max(pairs.values(), default=0))
            for length, of_length in pairs.items()
            if number < of_length
        ]
        is_usual = self._options.crowd_length == _SICK_LENGTH
        of_stored = {"drop", "stall", *(("crowd",) if is_usual else ())}
        num_sick = _NUM_SICK if of_stored & set(self._options.sick) else 0
        sick = [self._prompt(_SICK_LENGTH) for _ in range(num_sick)]
        for arm in self._stored:
            self._start_node(arm)
        for arm in self._arms:
            self._engines[arm] = self._stack.enter_context(self._engine(arm))
        for prompt in prompts + sick:
            for arm in self._stored if prompt in prompts else ["planned"]:
                self._ask(arm, prompt)
        document: dict[str, object] = {
            "schema": "headstart.bench.vllm_slow_disk/2",
            "environment": describe(),
            "settings": {"pairs": pairs, "dtype": "float32"},
            "speeds": [],
            "sick": {},
        }
        for bytes_per_s in self._options.bytes_per_s:
            document["speeds"].append(self._at(bytes_per_s, prompts))  # type: ignore[attr-defined]
            self._save(document)
        _show_behind(document["speeds"])  # type: ignore[arg-type]
        scenarios = {
            "drop": self._drop,
            "stall": self._stall,
            "crowd": self._crowd,
            "short": self._short,
        }
        for name in self._options.sick:
            found = document["sick"][name] = scenarios[name](sick)  # type: ignore[index]
            print(name, json.dumps(found)[:2000], flush=True)
            self._save(document)
        self._save(document)
        return document

    def _save(self, document: dict[str, object]) -> None:
        document["identical"] = all(len(each) == 1 for each in self._answers.values())
        self._options.json.write_text(json.dumps(document, indent=1) + "\n")

    # -- one speed after another

    def _at(self, bytes_per_s: int, prompts: list[list[int]]) -> dict[str, object]:
        """All arms with a disk of this speed."""
        known = self._restart(bytes_per_s)
        ttft: dict[str, dict[str, list[float]]] = {
            arm: {str(len(prompt)): [] for prompt in prompts} for arm in self._arms
        }
        for prompt in prompts:
            first = len(ttft["plain"][str(len(prompt))]) % len(self._arms)
            for arm in self._arms[first:] + self._arms[:first]:
                ttft[arm][str(len(prompt))].append(self._ask(arm, prompt))
            told = {arm: round(t[str(len(prompt))][-1], 3) for arm, t in ttft.items()}
            print(bytes_per_s, len(prompt), told, flush=True)
        found = {
            "bytes_per_s": bytes_per_s,
            "ttft_s": ttft,
            "ratios": _ratios(ttft),
            "against_best": _against_best(ttft),
            "decisions": self._decisions()[known:],
        }
        _show(found)
        return found

    # -- disks that become ill; `planned` against `plain`

    def _drop(self, prompts: list[list[int]]) -> dict[str, object]:
        """Full speed, from the 5th request on 2 MB/s, from the 13th on full speed again."""
        known = self._restart(0)
        rows, lifted_at, recovered_s = [], 0.0, None
        for number, prompt in enumerate(prompts):
            if number == 4:
                self._limit(_DROP_BYTES_PER_S)
            if number == 12:
                self._limit(0)
                lifted_at = time.monotonic()
            plain = self._ask("plain", prompt)
            asked_at = time.monotonic()
            rows.append({"plain_s": plain, "planned_s": self._ask("planned", prompt)})
            rows[-1]["ratio"] = rows[-1]["planned_s"] / plain
            if lifted_at and recovered_s is None and rows[-1]["ratio"] < 0.5:
                recovered_s = asked_at - lifted_at
        return {
            "rows": rows,
            "limited": [4, 12],
            "recovered_after_s": recovered_s,
            "decisions": self._decisions()[known:],
        }

    def _stall(self, prompts: list[list[int]]) -> dict[str, object]:
        """Nothing comes from the disk for 20 s from the 3rd request on."""
        known = self._restart(0)
        rows = []
        timer = None
        for number, prompt in enumerate(prompts[:12]):
            plain = self._ask("plain", prompt)
            if number == 2:
                self._limit(1)
                timer = threading.Timer(_STALL_S, self._limit, (0,))
                timer.start()
            rows.append({"plain_s": plain, "planned_s": self._ask("planned", prompt)})
            rows[-1]["late_s"] = rows[-1]["planned_s"] - 1.1 * plain
        assert timer is not None
        timer.join()
        return {"rows": rows, "decisions": self._decisions()[known:]}

    def _crowd(self, prompts: list[list[int]]) -> dict[str, object]:
        """Eight at once, each with a prefix of its own on one slow device, by arrival."""
        if self._options.crowd_length != _SICK_LENGTH:
            prompts = [self._prompt(self._options.crowd_length) for _ in range(_NUM_CROWD)]
            for prompt in prompts:
                self._ask("planned", prompt)
        known = self._restart(_CROWD_BYTES_PER_S)
        found: dict[str, object] = {}
        for arm in ("plain", "planned", "plain again"):
            time.sleep(_PAUSE_S)
            self._engines[arm].reset_prefix_cache()
            with ThreadPoolExecutor(_NUM_CROWD) as pool:
                futures = []
                for prompt in prompts[-_NUM_CROWD:]:
                    futures.append(pool.submit(self._engines[arm].ask, prompt))
                    time.sleep(0.05)
                replies = [future.result() for future in futures]
            for prompt, reply in zip(prompts[-_NUM_CROWD:], replies, strict=True):
                self._answers.setdefault(tuple(prompt), set()).add(reply.tokens)
            found[arm] = [reply.ttft_s for reply in replies]
        return {**found, "decisions": self._decisions()[known:]}

    def _short(self, _: list[list[int]]) -> dict[str, object]:
        """Prompts of one and two blocks that memory holds."""
        known = self._restart(0)
        rows: dict[str, dict[str, list[float]]] = {}
        for length in _SHORT:
            rows[str(length)] = {"plain": [], "planned": [], "plain again": []}
            for _number in range(_NUM_SHORT):
                prompt = self._prompt(length)
                self._ask("planned", prompt)
                for arm, times in rows[str(length)].items():
                    times.append(self._ask(arm, prompt))
        return {
            "rows": rows,
            "p50": {
                length: {
                    arm: median(map(truediv, times, by_arm["plain"]))
                    for arm, times in by_arm.items()
                }
                for length, by_arm in rows.items()
            },
            "decisions": self._decisions()[known:],
        }

    # -- engines and nodes

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(100, 40_000) for _ in range(length)]

    def _ask(self, arm: str, prompt: list[int]) -> float:
        """TTFT of what the engine itself has not got."""
        time.sleep(_PAUSE_S)
        self._engines[arm].reset_prefix_cache()
        reply = self._engines[arm].ask(prompt)
        self._answers.setdefault(tuple(prompt), set()).add(reply.tokens)
        return reply.ttft_s

    def _restart(self, bytes_per_s: int) -> int:
        """Empty the nodes' memory, on a disk of this speed; how many decisions it has."""
        for arm in self._stored:
            self._nodes[arm].close()
            self._engines[arm].ask([100] * 200)  # it notices, and asks again after a second
            self._start_node(arm)
        self._limit(bytes_per_s)
        _drop_caches()
        for arm in self._stored:
            for _ in range(30):
                time.sleep(_PAUSE_S)
                self._engines[arm].ask([100] * 200)
                words = ("node", "status", "--socket", str(self._socket(arm)), "--json", "-")
                if json.loads(self._headstart(*words))["gauges"]["engines"]:
                    break
            else:
                sys.exit(f"the engine of {arm} does not come back to its node")
        return len(self._decisions())

    def _decisions(self) -> list[object]:
        time.sleep(1.0)
        self._engines["planned"].ask([100] * 20)  # what is told goes with the next question
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
        environ = engine_environment() | {"VLLM_CPU_KVCACHE_SPACE": "1"}  # four at once
        with serving(command, environ=environ, log=log) as engine:
            engine.ask([100] * 64, max_tokens=4)  # the first request warms the engine up
            yield engine

    def _start_node(self, arm: str) -> None:
        config = self._folder / f"{arm}.toml"
        config.write_text(
            f'[memory]\ncapacity = "1GiB"\n[node]\nsocket = "{self._socket(arm)}"\n'
            f'metrics_port = 0\n[[tiers]]\nkind = "file"\nroot = "{self._folder / arm}"\n'
            'capacity = "6GiB"\n'
        )
        words = [str(Path(sys.executable).parent / "headstart"), "node", "run", "--config"]
        log = (self._folder.parent / f"slow-disk-{arm}-node.log").open("ab")
        process = subprocess.Popen([*words, str(config)], stdout=subprocess.PIPE, stderr=log)
        stack = self._nodes[arm] = ExitStack()
        stack.callback(process.wait)
        stack.callback(process.terminate)
        self._stack.callback(stack.close)
        # The kernel hands out what it throttles on the core that asked for it. On one on which an
        # engine spins between its steps, that is seconds late: far slower than the disk is to be.
        os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        group = _cgroup(arm)  # one each: they must not slow each other down
        group.mkdir(exist_ok=True)
        (group / "cgroup.procs").write_text(str(process.pid))
        assert process.stdout is not None
        if not process.stdout.readline():
            sys.exit(f"the node of {arm} does not start; see {log.name}")

    def _limit(self, bytes_per_s: int) -> None:
        """Bound the nodes' reads from their disk; 0: do not."""
        device = self._folder.stat().st_dev
        numbers = f"{os.major(device)}:{os.minor(device)}"
        for arm in self._stored:
            limit = _cgroup(arm) / "blkio.throttle.read_bps_device"
            limit.write_text(f"{numbers} {bytes_per_s}")

    def _headstart(self, *words: str) -> str:
        program = str(Path(sys.executable).parent / "headstart")
        return subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout


def _length(text: str) -> tuple[int, int | None]:
    """Of TOKENS[xPAIRS]."""
    length, _, pairs = text.partition("x")
    return int(length), int(pairs) if pairs else None


def _cgroup(arm: str) -> Path:
    return _CGROUPS / f"headstart-bench-{arm}"


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


def _against_best(ttft: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """By length: the median of the plan, by that of whichever is faster, always or never loading.

    The median of both plain arms stands for never: what a plan cannot do anything about.
    """
    if "always" not in ttft:
        return {}
    return {
        length: median(planned)
        / min(
            median(ttft["always"][length]),
            median(ttft["plain"][length] + ttft["plain again"][length]),
        )
        for length, planned in ttft["planned"].items()
    }


def _show_behind(speeds: list[dict[str, dict[str, float]]]) -> None:
    """How far the plan is behind the better of all and nothing, the mean over all points."""
    behind = [max(0.0, each - 1.0) for speed in speeds for each in speed["against_best"].values()]
    if behind:
        print(f"behind the better of all and nothing: {fmean(behind):.1%} of {len(behind)} points")


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
