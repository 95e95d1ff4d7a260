"""`headstart doctor` on a real vLLM (CPU) that is made ill in six ways: does it say what it is?

    .venv-vllm/bin/python benchmarks/vllm_doctor.py --json benchmarks/results/vllm_doctor.json

SmolLM2-135M in float32, computing on one core. Each scenario starts a server, sends a load with
`headstart bench serve`, keeps what a user has afterwards (/metrics before and after, the results,
and for three of them a few numbers that only the user knows), and asks the doctor.
`--only` takes some of them; `--keep FOLDER` keeps the files.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from headstart.bench.environment import describe
from headstart.bench.nodes import OwnNode
from headstart.bench.vllm import VllmServer, serving
from headstart.config import cache_dir, engine_environment
from headstart.engines.smollm2 import prepare_model
from headstart.engines.vllm.command import server_words

_HEADSTART = str(Path(sys.executable).with_name("headstart"))
_SLOW_BYTES_PER_S = 4_000_000


class Rig:
    """One scenario's servers, loads and files, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.files: list[Path] = []
        """What the doctor is shown."""

    @contextmanager
    def engine(self, *words: str, connector: object = None) -> Iterator[VllmServer]:
        """A server; its metrics are kept as of now and of the end."""
        model = prepare_model(cache_dir(), "float32")
        command = [*server_words(str(model)), "--dtype", "float32", "--enforce-eager"]
        command += ["--enable-prompt-tokens-details", "--skip-tokenizer-init", *words]
        if connector is not None:
            command += ["--kv-transfer-config", json.dumps(connector)]
        environ = engine_environment() | {"VLLM_CPU_KVCACHE_SPACE": "1"}
        log = self.folder / "vllm.log"
        with serving(command, environ=environ, log=log) as server:
            server.ask([100] * 40, max_tokens=4)  # what a first request costs is another matter
            self.scrape(server, "before")
            yield server
            self.scrape(server, "after")

    def scrape(self, server: VllmServer, name: str) -> None:
        """Keep a server's metrics."""
        path = self.folder / f"metrics-{name}.txt"
        path.write_bytes(server.request("GET", "/metrics")[1])
        self.files.append(path)
        time.sleep(1.1)  # files are read in the order of their times

    def load(self, server: VllmServer, name: str, *words: str) -> None:
        """Send a load."""
        path = self.folder / f"{name}.json"
        url = f"http://127.0.0.1:{server.port}"
        command = [_HEADSTART, "bench", "serve", "--url", url, "--warm-up", "0", *words]
        subprocess.run([*command, "--json", str(path)], check=True, stdout=subprocess.DEVNULL)
        self.files.append(path)

    def observe(self, text: str) -> None:
        """What only the user knows."""
        path = self.folder / "observations.toml"
        path.write_text(text)
        self.files.append(path)

    def diagnose(self) -> dict[str, object]:
        """What the doctor says of it all."""
        command = [_HEADSTART, "doctor", *(path.name for path in self.files), "--json", "-"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder)
        if not done.stdout:
            sys.exit(f"the doctor said nothing: {done.stderr}")
        return dict(json.loads(done.stdout))


def healthy(rig: Rig) -> None:
    """Chats on one system prompt, with room for all of them."""
    with rig.engine("--max-model-len", "2048", "--block-size", "32") as server:
        rig.load(server, "chats", *_chats(sessions=4, turns=3), "--prefix-cache")


def small_pool(rig: Rig) -> None:
    """Five at once, with room for the answers of three: running ones are thrown out again."""
    pool = ("--num-gpu-blocks-override", "56", "--block-size", "32", "--max-model-len", "1024")
    with rig.engine(*pool) as server:
        load = ("--workload", "unique", "--sessions", "10", "--shared-tokens", "0")
        load += ("--own-tokens", "300", "--output-tokens", "300", "--concurrency", "5")
        rig.load(server, "unique", *load, "--prefix-cache")


def slow_tier(rig: Rig) -> None:
    """A disk slower than computing, and a cache that loads whatever it finds there."""
    chance = random.Random(5)
    # The node's memory holds two of them: asked in turn, each one comes from the disk.
    prompts = [[chance.randrange(100, 30_000) for _ in range(1024)] for _ in range(3)]
    with rig.engine("--max-model-len", "2048") as server:
        computed_s = median(server.ask(prompt).ttft_s for prompt in prompts)
    config = rig.folder / "node.toml"
    config.write_text(
        'allow_faults = true\n[memory]\ncapacity = "96MiB"\n[[tiers]]\nkind = "file"\n'
        f'root = "{rig.folder}"\ncapacity = "2GiB"\n'
        f"[[tiers.faults]]\nbytes_per_s = {_SLOW_BYTES_PER_S}\n"
    )
    socket = rig.folder / "node.sock"
    node = OwnNode("the node", socket, rig.folder / "node", config)
    (rig.folder / "node").mkdir()
    connector = {
        "kv_connector": "HeadstartConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "node": str(socket),
            "load": "always",
            "max_wait": "10min",
            "stall": "10min",
        },
    }
    hashing = ("--prefix-caching-hash-algo", "sha256_cbor", "--block-size", "128")
    try:
        node.start()
        with rig.engine("--max-model-len", "2048", *hashing, connector=connector) as server:
            for prompt in prompts:
                server.ask(prompt)
                node.settle()
            server.reset_prefix_cache()
            rig.files = []  # of the other server, and of this one before there were hits
            rig.scrape(server, "before")
            loaded_s = median(server.ask(prompt).ttft_s for prompt in prompts)
    finally:
        node.remove()
    rig.observe(
        f'[[arms]]\nname = "without"\ncache = "off"\nttft_p50 = {computed_s}\n'
        f'[[arms]]\nname = "with"\ncache = "warm"\nttft_p50 = {loaded_s}\n'
    )


def block_size(rig: Rig) -> None:
    """Blocks of 512 tokens, and a system prompt of 300."""
    with rig.engine("--max-model-len", "2048", "--block-size", "512") as server:
        load = ("--workload", "shared-prefix", "--sessions", "8", "--shared-tokens", "300")
        load += ("--own-tokens", "100", "--output-tokens", "2")
        rig.load(server, "shared", *load, "--prefix-cache")
    rig.observe("shared_tokens = 300\n")


def timestamp(rig: Rig) -> None:
    """A system prompt of 400 tokens behind the time of day."""
    with rig.engine("--max-model-len", "2048", "--block-size", "32") as server:
        for number in range(8):
            now = [200 + number, *range(300, 308)]
            server.ask([*now, *range(1000, 1400), *range(2000 + number, 2060 + number)])
    rig.observe("template_tokens = 409\nfirst_difference = 0\n")


def crowded(rig: Rig) -> None:
    """Twelve clients at a server that takes two at once."""
    with rig.engine(
        "--max-model-len", "2048", "--block-size", "32", "--max-num-seqs", "2"
    ) as server:
        load = ("--workload", "unique", "--sessions", "36", "--shared-tokens", "0")
        load += ("--own-tokens", "200", "--output-tokens", "20", "--concurrency", "12")
        rig.load(server, "unique", *load, "--prefix-cache")


def _chats(*, sessions: int, turns: int) -> tuple[str, ...]:
    words = ("--workload", "multi-turn", "--sessions", str(sessions), "--turns", str(turns))
    words += ("--shared-tokens", "384", "--own-tokens", "64", "--output-tokens", "8")
    return (*words, "--block-size", "32")


SCENARIOS: dict[Callable[[Rig], None], Sequence[str]] = {
    healthy: ("no_fault",),
    small_pool: ("no_room",),
    slow_tier: ("slow_tier",),
    block_size: ("block_size",),
    timestamp: ("configuration",),
    crowded: ("routing",),
}
"""And the verdicts that are right."""


def main() -> None:
    """Run it."""
    names = {scenario.__name__: scenario for scenario in SCENARIOS}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=names, default=list(names))
    parser.add_argument("--keep", type=Path, help="folder for what the doctor is shown")
    options = parser.parse_args()
    found: dict[str, object] = {}
    document = {"schema": "headstart.bench.vllm_doctor/1", "environment": describe()}
    document["scenarios"] = found
    wrong = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.only:
            rig = Rig((options.keep or Path(temporary)) / name)
            started = time.monotonic()
            names[name](rig)
            told = rig.diagnose()
            expected = SCENARIOS[names[name]]
            found[name] = {
                "what": names[name].__doc__,
                "expected": list(expected),
                "seconds": round(time.monotonic() - started, 1),
                **told,
            }
            if told["verdict"] not in expected:
                wrong.append(name)
            print(f"{name}: {told['verdict']}, expected {' or '.join(expected)}", flush=True)
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
