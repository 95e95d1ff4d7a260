"""Kill a writer with SIGKILL at random moments, open its directory again, and look for harm.

    python benchmarks/crash.py --kills 200 --json FILE

A child stores chains of blocks and reports each one that was acknowledged and flushed. After the
kill the parent opens the directory and reads every block of every chain that was ever begun:

- a block that comes out must be exactly what is stored under its key (`wrong_blocks`),
- where nothing was evicted, all that was acknowledged and flushed must be there (`lost_blocks`),
- no block is held without the one before it (`holes`).

Lives differ: with room for everything, and with so little that slots are reused and the log is
compacted all the time; through the tier alone, and through a store with its threads. Exit code 1
when anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from headstart import journal
from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.store import PrefixStore
from headstart.testing import aligned_buffers
from headstart.testing.ledger import payload
from headstart.tiers import FileTier, FileTierOptions, MemoryTier, read, write
from headstart.transfer import Transfer
from headstart.types import KeyChain, Outcome

BLOCK_NBYTES = 20_000
SLOT_NBYTES = 24_576
KILLS_PER_LIFE = 5
MAX_LENGTH = 9
LAYOUT = BlockLayout(block_size=1, axes="byte", shape=(BLOCK_NBYTES,), dtype="uint8")
NAMESPACE = Namespace(model="crash", weights="none", layout=LAYOUT)


@dataclass(frozen=True, slots=True)
class Life:
    """One directory, whose writer is killed several times."""

    root: Path
    tight: bool
    """Little room and constant compaction, instead of room for everything."""
    threads: bool
    """Through a store, whose threads write."""

    def options(self) -> FileTierOptions:
        """What the directory is opened with, by writers and by the reader."""
        return FileTierOptions(
            root=self.root,
            capacity_nbytes=(48 if self.tight else 8192) * SLOT_NBYTES,
            slab_nbytes=(8 if self.tight else 512) * SLOT_NBYTES,
            durable=False,
        )


@dataclass(slots=True)
class Report:
    """What was found; `good` when nothing was."""

    schema: str = "headstart.bench.crash/1"
    kills: int = 0
    chains_acknowledged: int = 0
    chains_interrupted: int = 0
    blocks_read: int = 0
    damaged_blocks: int = 0
    """Read as damaged and dropped, as they must be: halfway overwritten by a killed writer."""
    log_nbytes_cut: int = 0
    wrong_blocks: int = 0
    lost_blocks: int = 0
    holes: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing was found."""
        return not (self.wrong_blocks or self.lost_blocks or self.holes or self.failures)

    def as_json(self) -> str:
        """One object; `good` included."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(values | {"good": self.good}, indent=2)


def chain_of(number: int) -> KeyChain:
    """Chain `number`: one to MAX_LENGTH blocks; some share their first blocks with others."""
    choose = random.Random(number)
    length = choose.randint(1, MAX_LENGTH)
    shared = choose.randint(0, length - 1)
    trunk = number // 4
    path = [f"{trunk}/{n}" for n in range(shared)] + [
        f"{number}#{n}" for n in range(shared, length)
    ]
    return keys_from_hashes(NAMESPACE, [content.encode() for content in path])


def content_of(chain: KeyChain, index: int) -> bytes:
    """What is stored as block `index`: its key decides."""
    return payload(chain.namespace, chain.keys[index], 0, BLOCK_NBYTES)


def write_forever(life: Life, first: int, acknowledge: int) -> None:
    """The child: store chain after chain, and report each when it is flushed."""
    if life.tight:
        journal._SLACK_RECORDS = 40
    tier = FileTier(life.options())
    tier.open_namespace(NAMESPACE)
    memory = MemoryTier(capacity_nbytes=4 << 20)
    store = PrefixStore(memory, [(tier, Transfer("crash", num_threads=4))])
    store.open_namespace(NAMESPACE)
    sources = aligned_buffers(MAX_LENGTH, BLOCK_NBYTES)
    os.write(acknowledge, b"ready\n")
    for number in range(first, first + 100_000):
        chain = chain_of(number)
        for index, source in enumerate(sources[: len(chain)]):
            source[:BLOCK_NBYTES] = content_of(chain, index)
        os.write(acknowledge, b"begin %d\n" % number)
        if life.threads:
            outcomes = store.store(chain, [s[:BLOCK_NBYTES] for s in sources[: len(chain)]])
            store.flush()
        else:
            outcomes = write(tier, chain, sources[: len(chain)])
            tier.flush()
        if set(outcomes) != {Outcome.DONE}:
            os.write(acknowledge, b"failed %d\n" % number)
        os.write(acknowledge, b"done %d\n" % number)


def run_and_kill(life: Life, first: int, delay_s: float, *, opening: bool) -> list[bytes]:
    """Run a writer, kill it `delay_s` after it is ready; the lines it wrote until then.

    With `opening`, `delay_s` after it was started: perhaps while it recovers the directory.
    """
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(receive)
            write_forever(life, first, send)
        finally:
            os._exit(1)
    os.close(send)
    lines = b""
    deadline = time.monotonic() + delay_s if opening else None
    while True:
        timeout_s = 30.0 if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([receive], [], [], timeout_s)
        if ready:
            chunk = os.read(receive, 1 << 16)
            lines += chunk
            if deadline is None and lines.startswith(b"ready"):
                deadline = time.monotonic() + delay_s
            if not chunk:
                break
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    os.close(receive)
    os.waitpid(child, 0)
    return lines.split(b"\n")[:-1]


def inspect(life: Life, begun: list[int], acknowledged: list[int], report: Report) -> None:
    """Open the directory as the next process would, and read everything."""
    tier = FileTier(life.options())
    report.log_nbytes_cut += tier._journal.num_cut
    tier.open_namespace(NAMESPACE)
    tier.check_invariants()
    # A tight tier evicts the oldest; what was acknowledged last is there even so.
    must_be_there = set(acknowledged[-2:] if life.tight else acknowledged)
    targets = aligned_buffers(MAX_LENGTH, BLOCK_NBYTES)
    for number in begun:
        chain = chain_of(number)
        held = [tier.lookup([key]) for key in chain]
        report.holes += held != sorted(held, reverse=True)
        outcomes = read(tier, chain, targets[: len(chain)])
        for index, outcome in enumerate(outcomes):
            report.blocks_read += outcome is Outcome.DONE
            report.damaged_blocks += outcome is Outcome.DROPPED
            if outcome is Outcome.DONE:
                content = bytes(targets[index][:BLOCK_NBYTES])
                report.wrong_blocks += content != content_of(chain, index)
            elif number in must_be_there:
                report.lost_blocks += 1
    tier.check_invariants()
    tier.close()


def crash(num_kills: int, seed: int, folder: Path) -> Report:
    """Kill `num_kills` writers under `folder`."""
    started, choose, report = time.monotonic(), random.Random(seed), Report()
    life = Life(folder / "none", tight=False, threads=False)
    begun: list[int] = []
    acknowledged: list[int] = []
    for kill in range(num_kills):
        if kill % KILLS_PER_LIFE == 0:
            shutil.rmtree(life.root, ignore_errors=True)
            number = kill // KILLS_PER_LIFE
            life = Life(folder / f"life{number}", tight=number % 2 == 1, threads=number % 4 >= 2)
            begun, acknowledged = [], []
        opening = choose.random() < 0.2
        scale_s = choose.choice((0.002, 0.01)) if opening else choose.choice((0.0, 0.01, 0.05))
        delay_s = scale_s * (0.5 + choose.random())
        lines = run_and_kill(life, 1_000_000 * kill, delay_s, opening=opening)
        numbers = {
            kind: [int(line.split()[1]) for line in lines if line.startswith(kind)]
            for kind in (b"begin", b"done", b"failed")
        }
        if numbers[b"failed"] or not (lines or opening):
            report.failures.append(f"kill {kill}: the writer did not run: {lines[-3:]}")
        begun += numbers[b"begin"]
        acknowledged += numbers[b"done"]
        report.kills += 1
        report.chains_acknowledged += len(numbers[b"done"])
        report.chains_interrupted += len(numbers[b"begin"]) - len(numbers[b"done"])
        inspect(life, begun, acknowledged, report)
    report.seconds = time.monotonic() - started
    return report


def main() -> int:
    """Run as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="default: another one every time")
    parser.add_argument("--folder", type=Path, default=None, help="where the directories are made")
    parser.add_argument("--json", default="-", help="file for the result, - for stdout")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else time.time_ns()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="headstart-crash-") as folder:
        report = crash(arguments.kills, seed, Path(folder))
    if arguments.json == "-":
        print(report.as_json())
    else:
        Path(arguments.json).write_text(report.as_json() + "\n", encoding="utf-8")
    if not report.good:
        print(f"crash.py found harm; repeat with --seed {seed}", file=sys.stderr)
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
