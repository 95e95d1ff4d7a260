"""CPU time of the scheduler's thread that one request costs, all hooks and polls together.

    .venv-vllm/bin/python benchmarks/vllm_hooks.py --json benchmarks/results/vllm_hooks.json

A real node and the scheduler's half of the connector, with prompts of 7,000 tokens in blocks of
128; the engine around it is a loop that calls the hooks in vLLM's order. Blocks are small, since
the hooks never touch their bytes. Three kinds of request:

    miss     unknown: computed in four steps of at most 2,048 tokens, all of it stored
    memory   held in memory
    file     held on the disk: polled every 1.5 ms, as an idle engine does, until it is read
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headstart.bench.environment import describe
from headstart.engines.vllm.options import Options
from headstart.engines.vllm.scheduler import SchedulerSide
from headstart.engines.vllm.shape import BlockShape
from headstart.engines.vllm.step import WorkerMeta
from headstart.keys import BlockLayout, Namespace
from headstart.node.client import NodeClient
from headstart.node.mapping import ArenaMapping

BLOCK_SIZE, BLOCK_NBYTES, TOKENS, STEP = 128, 64 << 10, 7000, 2048
POLL_S = 0.0015


@dataclass
class Request:
    """What the hooks read of vLLM's request."""

    request_id: str
    block_hashes: list[bytes]
    num_tokens: int = TOKENS
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    lora_request: Any = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False


@dataclass
class Meter:
    """Sums the CPU time of calls."""

    seconds: float = 0.0
    polls: int = 0
    costs: list[float] = field(default_factory=list)

    def __call__(self, call: Callable[[], Any]) -> Any:
        """Make a call; its answer."""
        started = time.thread_time()
        answer = call()
        self.seconds += time.thread_time() - started
        return answer

    def end(self) -> None:
        """A request is over."""
        self.costs.append(self.seconds)
        self.seconds = 0.0


def serve(side: SchedulerSide, request: Request, meter: Meter) -> int:
    """One request from its arrival to its end; the tokens that were loaded."""
    table = list(range(len(request.block_hashes) + 1))
    blocks = SimpleNamespace(get_block_ids=lambda: (table,))
    state = SimpleNamespace(get_block_ids=lambda request_id: (table,))
    meter(lambda: side.on_new_request(request))
    while (found := meter(lambda: side.num_matched(request, 0)))[0] is None:
        meter.polls += 1
        idle = SimpleNamespace(num_scheduled_tokens={}, kv_connector_block_state=state)
        meter(lambda output=idle: side.step(output))
        time.sleep(POLL_S)
    loaded = found[0]
    meter(lambda: side.admitted(request, blocks, loaded))
    request.num_computed_tokens = loaded
    while request.num_computed_tokens < request.num_tokens:
        count = min(STEP, request.num_tokens - request.num_computed_tokens)
        scheduled = {request.request_id: count}
        output = SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)
        meta = meter(lambda output=output: side.step(output))
        told = WorkerMeta()
        for copy in (*meta.loads, *meta.stores):
            told.done[copy.ticket] += 1
        request.num_computed_tokens += count
        meter(lambda told=told: side.workers_told(told))
    meter(lambda: side.request_finished(request.request_id))
    meter.end()
    return loaded


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--root", type=Path, default=Path("build"))
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.root, prefix="vllm-hooks-") as folder:
        results = run(Path(folder).absolute(), options.requests)
    document = {
        "schema": "headstart.bench.vllm_hooks/1",
        "environment": describe(),
        "settings": {"tokens": TOKENS, "block_size": BLOCK_SIZE, "requests": options.requests},
        "cpu_s": results,
    }
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    for kind, cost in results.items():
        numbers = ", ".join(f"{name} {value * 1e3:.3f} ms" for name, value in cost.items())
        print(f"{kind:7} {numbers}")


def run(folder: Path, num_requests: int) -> dict[str, dict[str, float]]:
    """CPU seconds by kind of request."""
    config = folder / "headstart.toml"
    socket = folder / "node.sock"
    config.write_text(
        f'[memory]\ncapacity = "2GiB"\n[node]\nsocket = "{socket}"\nmetrics_port = 0\n'
        f'[[tiers]]\nkind = "file"\nroot = "{folder / "blocks"}"\ncapacity = "4GiB"\n'
    )
    prompts = [
        [secrets.token_bytes(32) for _ in range(TOKENS // BLOCK_SIZE)] for _ in range(num_requests)
    ]
    results = {}
    for kinds in (("miss", "memory"), ("file",)):
        headstart("node", "start", "--config", str(config))
        side, mapping = make_side(socket)
        for kind in kinds:
            meter = Meter()
            loaded = [
                serve(side, Request(f"{kind}-{number}", hashes), meter)
                for number, hashes in enumerate(prompts)
            ]
            expected = 0 if kind == "miss" else TOKENS // BLOCK_SIZE * BLOCK_SIZE
            if set(loaded) != {expected}:
                sys.exit(f"{kind}: not all requests loaded {expected} tokens")
            costs = sorted(meter.costs)
            results[kind] = {
                "p50": costs[len(costs) // 2],
                "p99": costs[int(len(costs) * 0.99)],
                "max": costs[-1],
            }
        side.close()
        mapping.close()
        headstart("node", "stop", "--socket", str(socket))
    return results


def make_side(socket: Path) -> tuple[SchedulerSide, ArenaMapping]:
    """The scheduler's half, and a worker's mapping for it."""
    mapping = ArenaMapping(socket)
    mapping.attach()
    layout = BlockLayout(
        block_size=BLOCK_SIZE, axes="rank byte", shape=(1, BLOCK_NBYTES), dtype="uint8"
    )
    namespace = Namespace(model="hooks", weights="none", layout=layout)
    side = SchedulerSide(
        NodeClient(socket, [mapping.token], is_buffered=True),
        lambda epoch, adapter: namespace,
        shape=BlockShape(
            block_size=BLOCK_SIZE,
            shard_nbytes=BLOCK_NBYTES,
            shard_stride=BLOCK_NBYTES,
            world_size=1,
        ),
        options=Options(),
    )
    return side, mapping


def headstart(*words: str) -> None:
    """Run a command of Headstart's."""
    program = Path(sys.executable).parent / "headstart"
    subprocess.run([program, *words], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
