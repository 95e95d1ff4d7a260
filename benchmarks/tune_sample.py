"""How long `headstart tune --sample` takes, and how far off it is, on made traces of agents.

    python benchmarks/tune_sample.py --json FILE [--references 2000000,8000000] [--share 10%]

Sessions are like those of kv-cache-tester (710 of about 69 turns, some of which start over from
their first blocks), with prompts as long as it takes to have so many references to blocks. The
trace is written to a temporary file and deleted. Of each size: seconds of CPU and peak memory of
the sampled command, as a process. Of the smallest also of the command without a sample, and how
many of its figures the sample's errors hold for. From the two largest, what 94 million references
would take, if it goes on in proportion. Exit code 1 when under four of five errors hold.
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
from pathlib import Path

from headstart.bench.environment import describe

NUM_SESSIONS = 710
NUM_TURNS = 69
BLOCK_SIZE = 64
ASKED_REFERENCES = 94_000_000
_START_SHARE = 0.4
"""Of the mean prompt, at a session's first turn."""
_FRESH_SHARE = 0.02
"""Of the turns: what was said is cut down to what it began with, and goes on."""


def write_trace(path: Path, num_references: int, seed: int) -> int:
    """Write sessions as lines of JSON; how many references to blocks they have."""
    rng = random.Random(seed)
    mean = num_references / (NUM_SESSIONS * NUM_TURNS)
    count = 0
    with path.open("w") as file:
        for number in range(NUM_SESSIONS):
            requests, written = _session(rng, mean)
            count += written
            file.write(
                f'{{"id":"{number}","block_size":{BLOCK_SIZE},"requests":[{",".join(requests)}]}}\n'
            )
    return count


def _session(rng: random.Random, mean: float) -> tuple[list[str], int]:
    """Its requests as JSON, and the number of their references."""
    num_turns = 1 + int(rng.expovariate(1 / (NUM_TURNS - 1)))
    num_first = max(1, int(mean * _START_SHARE * rng.lognormvariate(0.0, 0.3)))
    ids = [str(each) for each in range(num_first)]
    requests, next_id, count = [], num_first, 0
    for _ in range(num_turns):
        if rng.random() < _FRESH_SHARE:
            del ids[num_first:]
        num_new = int(rng.expovariate(NUM_TURNS / mean)) + (rng.random() < 0.5)
        ids += map(str, range(next_id, next_id + num_new))
        next_id += num_new
        pause = rng.lognormvariate(2.3, 2.2)  # half of them under 10 s
        requests.append(
            f'{{"t":0,"in":{len(ids) * BLOCK_SIZE},"out":200,"think_time":{pause:.1f},'
            f'"hash_ids":[{",".join(ids)}]}}'
        )
        count += len(ids)
    return requests, count


def tuned(path: Path, *words: str) -> dict:
    """The command's answer, with what it took."""
    result = path.with_suffix(".json")
    started = time.monotonic()
    command = [sys.executable, "-m", "headstart", "tune", str(path), *words, "--json", str(result)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the command failed: {command}")
    return {
        "wall_s": time.monotonic() - started,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_nbytes": usage.ru_maxrss * 1024,
        "found": json.loads(result.read_text()),
    }


def held(whole: dict, some: dict) -> list[bool]:
    """Of each figure at the same capacities, whether the sample's error holds."""
    found = []
    for true, told, error in zip(
        whole["curve"], some["curve"], some["sample"]["curve"], strict=True
    ):
        for name in ("token_hit", "token_hit_last_half"):
            found.append(abs(true[name] - told[name]) <= error[f"{name}_error"])
    return found


def main() -> None:
    """Run as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--references", default="2000000,8000000")
    parser.add_argument("--share", default="10%")
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory(prefix="headstart-") as folder:
        for number, wanted in enumerate(sorted(map(int, options.references.split(",")))):
            path = Path(folder) / f"{number}.jsonl"
            count = write_trace(path, wanted, seed=number)
            run = {"references": count, "file_nbytes": path.stat().st_size}
            words: list[str] = []
            if not runs:  # the smallest, against all of it
                whole = tuned(path)
                capacities = ",".join(str(p["capacity_tokens"]) for p in whole["found"]["curve"])
                words = ["--capacities", capacities]
            some = tuned(path, "--sample", options.share, *words)
            run["sample"] = {key: value for key, value in some.items() if key != "found"}
            run["sample_sessions"] = some["found"]["sample"]["sessions"]
            if not runs:
                run["whole"] = {key: value for key, value in whole.items() if key != "found"}
                holds = held(whole["found"], some["found"])
                run["figures"], run["figures_held"] = len(holds), sum(holds)
            runs.append(run)
            path.unlink()
            print(json.dumps(run))
    document = {
        "schema": "headstart.bench.tune_sample/1",
        "environment": describe(),
        "settings": {"references": options.references, "share": options.share},
        "runs": runs,
    }
    if len(runs) > 1:
        less, more = runs[-2:]
        per = {
            name: (more["sample"][name] - less["sample"][name])
            / (more["references"] - less["references"])
            for name in ("cpu_s", "peak_nbytes")
        }
        document["extrapolated"] = {
            "references": ASKED_REFERENCES,
            **{
                name: more["sample"][name] + each * (ASKED_REFERENCES - more["references"])
                for name, each in per.items()
            },
        }
        print(json.dumps(document["extrapolated"]))
    options.json.write_text(json.dumps(document, indent=1) + "\n")
    if runs[0]["figures_held"] < 0.8 * runs[0]["figures"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
