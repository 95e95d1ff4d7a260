"""How true `headstart tune` is: its hit rates and first tokens against those of real vLLM.

    benchmarks/serve_arms.sh build/serve_arms
    python benchmarks/tune_validate.py build/serve_arms/*.json --json FILE [--traces FOLDER]

Of each file of `serve_arms.sh`, each arm (vLLM's own prefix cache alone; the same with Headstart)
and each phase: what the tuner's simulator and latency model say, without having seen it.

    prompts   made anew by the workload's options in serve_arms.sh and the run's salt, proved by the
              run's digest, in the order in which they were sent, all phases as one trace
    sizes     the pool, memory and drive of serve_arms.sh; KV of a token by the model's config.json
    prefill   learnt from the arms without Headstart of the *other* files
    reading   the figure of benchmarks/results/storage.json for the blocks that are nearest in size
    copying   what the connector takes for granted before it has measured

Nothing is fitted on what is predicted. Exit code 2 for files that do not belong together.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median

import msgspec

from headstart.bench.environment import describe
from headstart.bench.export import mooncake
from headstart.bench.imports import read_runs
from headstart.bench.load import Ask, Shape, fingerprint, salted
from headstart.bench.phases import Phase
from headstart.bench.run import Run
from headstart.bench.statistics import quantile
from headstart.cli.load_options import ShapeOptions, TraceOptions
from headstart.errors import ConfigError, HeadstartError
from headstart.sizing.configfile import read_model
from headstart.sizing.hardware import Drive, Gpu, Hardware, Link, look_up
from headstart.tuner.case import Case, Setting, Site, make_site
from headstart.tuner.held import RestartedTiers
from headstart.tuner.latency import COMPUTED, Answered
from headstart.tuner.measured import learnt_costs
from headstart.tuner.recorded import record

HERE = Path(__file__).parent
MODEL, KV_DTYPE = "smollm2-135m", "float32"
POOL_BLOCKS = 64
MEMORY_NBYTES, FILE_NBYTES = 512 << 20, 4 << 30
NO_CACHE, OWN_CACHE, HEADSTART = "none", "gpu-prefix", "headstart"
ARMS = (OWN_CACHE, HEADSTART)
COPY_BYTES_PER_S = 4e9
"""The prior of `headstart.engines.vllm`."""
HIT_LIMIT, TTFT_LIMIT = 0.01, 0.15
"""Asked for: a point of hit rate, and a share of the p50 of times to the first token."""


def workloads(script: Path) -> dict[str, list[str]]:
    """The options of each workload of serve_arms.sh, by its name."""
    text = script.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    found = [shlex.split(line, comments=True) for line in lines if line.startswith("measure ")]
    return {words[1]: words[4:] for words in found}  # measure NAME ARMS PHASES OPTIONS...


def load_of(words: Sequence[str], traces: Path) -> tuple[list[Ask], Shape]:
    """What a workload asks, without salts. Raises ConfigError."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, exit_on_error=False)
    for name in ("sessions", "turns", "shared-tokens", "own-tokens", "output-tokens", "documents"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--workload")
    parser.add_argument("--trace")
    for name, kind in (("limit", int), ("max-prompt-tokens", int), ("scale-tokens", float)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--time-scale", type=float)
    told = vars(parser.parse_args(list(words)))
    if "trace" in told:
        told["trace"] = traces / Path(told["trace"]).name
    sessions = told.pop("sessions", 16)
    of_trace = {name: told.pop(name) for name in TraceOptions.__dataclass_fields__ if name in told}
    shaped = ShapeOptions(**told)
    shape = shaped.shape(sessions)
    return TraceOptions(**of_trace).asks(shaped.workload, shape), shape


def write_trace(path: Path, runs: Sequence[Run], asks: Sequence[Ask], shape: Shape) -> None:
    """Write what the runs sent, one after the other, as Mooncake's lines. Raises ConfigError.

    With whole blocks only: an engine's cache holds no other.
    """
    timed, start_s = [], 0.0
    for run in runs:
        if run.prompts != fingerprint(asks):
            raise ConfigError(
                f"the run {run.arm}/{run.phase} asked other prompts than serve_arms.sh has now"
            )
        asked = salted(asks, run.salt, shape)
        for request, ask in zip(run.requests, asked, strict=True):
            if not request.is_good or request.prompt_tokens != len(ask.tokens):
                raise ConfigError(f"the run {run.arm}/{run.phase} has requests that failed")
            timed.append((start_s + (request.sent_s or 0.0), ask))
        start_s += run.duration_s
    timed.sort(key=lambda each: each[0])
    size = runs[0].block_size
    with path.open("wb") as file:
        for row in mooncake(timed, size):
            ids = row["hash_ids"][: row["input_length"] // size]  # type: ignore[index,operator]
            line = {**row, "hash_ids": ids, "block_size": size}
            file.write(msgspec.json.encode(line) + b"\n")


def machine_of(storage: Path, block_nbytes: int) -> Hardware:
    """The machine, as `bench storage` found its drive."""
    results = json.loads(storage.read_text(encoding="utf-8"))["results"]
    nearest = min(results, key=lambda each: abs(math.log(each["block_nbytes"] / block_nbytes)))
    return Hardware(
        # Of its peak only the ratio of weights to attention matters once prefills are learnt.
        gpu=Gpu(name="one core of a CPU", flops={"bf16": 1e11}),
        link=Link(bytes_per_s=COPY_BYTES_PER_S),
        drive=Drive(
            read_bytes_per_s=nearest["read_bytes_per_s"],
            write_bytes_per_s=nearest["write_bytes_per_s"],
            latency_s=0.0,
        ),
        block_s=0.0,  # what was measured was measured with it
    )


def site_of(storage: Path, block_size: int) -> Site:
    """The model on the machine; prefills by its peak, until they are learnt."""
    model = read_model(MODEL)
    block_nbytes = round(model.token_nbytes(KV_DTYPE, all_layers=True)) * block_size
    machine = look_up(machine_of(storage, block_nbytes))
    pool_nbytes = POOL_BLOCKS * block_nbytes
    return make_site(model, machine, kv_dtype=KV_DTYPE, engine_kv_nbytes=pool_nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One phase of one arm in one round: as measured, or as predicted."""

    cached_tokens: list[int]
    ttft_s: list[float]
    by_source: dict[str, int] | None

    def hit_rate(self, prompt_tokens: int) -> float:
        """Of tokens."""
        return sum(self.cached_tokens) / prompt_tokens


def measured(run: Run) -> Part:
    """What the server said and the client saw, in the order sent."""
    requests = sorted(run.requests, key=lambda each: each.sent_s or 0.0)
    return Part(
        cached_tokens=[each.cached_tokens or 0 for each in requests],
        ttft_s=[each.ttft_s or 0.0 for each in requests],
        by_source=run.hit_tokens_by_tier,
    )


def predicted(runs: Sequence[Run], asks: Sequence[Ask], shape: Shape, site: Site) -> list[Part]:
    """What the tuner says of an arm's phases, in order. Raises ConfigError."""
    starts = [len(asks) * number for number in range(len(runs))]
    restarts = [start for start, run in zip(starts, runs, strict=True) if emptied(run)]
    with tempfile.TemporaryDirectory(prefix="headstart-") as folder:
        path = Path(folder) / "sent.jsonl"
        write_trace(path, runs, asks, shape)
        recorded = record(path)
    is_tiered = runs[0].arm == HEADSTART
    setting = Setting(
        memory_nbytes=MEMORY_NBYTES if is_tiered else 0,
        file_nbytes=FILE_NBYTES if is_tiered else 0,
        block_size=recorded.block_size,
    )
    case = Case(recorded, site, RestartedTiers(restarts), concurrency=1)
    _, asked, answered = case.replayed(setting)
    tokens = asked.num_tokens.tolist()
    return [part(answered, tokens, start, start + len(asks)) for start in starts]


def emptied(run: Run) -> bool:
    """Whether engine and node started anew before a run. Raises ConfigError."""
    phase = Phase(run.phase)
    if phase not in (Phase.COLD, Phase.STEADY, Phase.HOST_COLD):
        raise ConfigError(
            f"what {phase} empties is not simulated here; cold, steady, host-cold are"
        )
    return phase is Phase.HOST_COLD


def part(answered: Answered, tokens: Sequence[int], start: int, end: int) -> Part:
    """The requests from `start` to `end`."""
    computed = answered.sources[COMPUTED][start:end].tolist()
    return Part(
        cached_tokens=[each - new for each, new in zip(tokens[start:end], computed, strict=True)],
        ttft_s=answered.ttft_s[start:end].tolist(),
        by_source={
            name: int(each[start:end].sum())
            for name, each in answered.sources.items()
            if name != COMPUTED
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A phase of an arm: medians of the rounds, measured against predicted."""

    workload: str
    arm: str
    phase: str
    rounds: int
    requests: int
    hit: float
    hit_predicted: float
    same_hits: int
    """Requests of all rounds with just the cached tokens that were predicted."""
    p50_s: float
    p50_predicted_s: float
    p90_s: float
    p90_predicted_s: float
    round_p50_s: list[float]
    """Measured, of each round: how far two runs of the same are apart."""
    tokens_by_source: list[dict[str, int] | None]
    tokens_by_source_predicted: dict[str, int] | None

    @property
    def hit_points(self) -> float:
        """Predicted less measured."""
        return 100.0 * (self.hit_predicted - self.hit)

    @property
    def p50_ratio(self) -> float:
        """Predicted to measured."""
        return self.p50_predicted_s / self.p50_s

    @property
    def is_within(self) -> bool:
        """Whether both are as near as asked for."""
        is_near = abs(self.p50_ratio - 1.0) <= TTFT_LIMIT
        return is_near and abs(self.hit_predicted - self.hit) <= HIT_LIMIT


def compared(name: str, run: Run, pairs: Sequence[tuple[Part, Part]]) -> Row:
    """The rounds of one phase; `pairs` of measured and predicted."""
    prompt_tokens = sum(each.prompt_tokens for each in run.requests)
    seen, said = zip(*pairs, strict=True)

    def middle(parts: Iterable[Part], share: float) -> float:
        return median(quantile(each.ttft_s, share) for each in parts)

    return Row(
        workload=name,
        arm=run.arm,
        phase=run.phase,
        rounds=len(pairs),
        requests=len(run.requests),
        hit=mean(each.hit_rate(prompt_tokens) for each in seen),
        hit_predicted=mean(each.hit_rate(prompt_tokens) for each in said),
        same_hits=sum(
            one == other
            for true, told in pairs
            for one, other in zip(true.cached_tokens, told.cached_tokens, strict=True)
        ),
        p50_s=middle(seen, 0.5),
        p50_predicted_s=middle(said, 0.5),
        p90_s=middle(seen, 0.9),
        p90_predicted_s=middle(said, 0.9),
        round_p50_s=[quantile(each.ttft_s, 0.5) for each in seen],
        tokens_by_source=[each.by_source for each in seen],
        tokens_by_source_predicted=said[0].by_source,
    )


def rows_of(
    name: str, runs: Sequence[Run], site: Site, words: list[str], traces: Path
) -> list[Row]:
    """All arms and phases of a file."""
    asks, shape = load_of(words, traces)
    pairs: dict[tuple[str, str], list[tuple[Part, Part]]] = {}
    first: dict[tuple[str, str], Run] = {}
    for arm in ARMS:
        of_arm = [run for run in runs if run.arm == arm]
        for number in sorted({run.round for run in of_arm}):
            phases = [run for run in of_arm if run.round == number]
            for run, said in zip(phases, predicted(phases, asks, shape, site), strict=True):
                key = (run.arm, run.phase)
                pairs.setdefault(key, []).append((measured(run), said))
                first.setdefault(key, run)
    return [compared(name, first[key], found) for key, found in pairs.items()]


def learnt_site(site: Site, runs: dict[str, list[Run]], without: str) -> Site:
    """The site with prefills of all files but one. Raises ConfigError."""
    others = [
        run
        for name, found in runs.items()
        for run in found
        if name != without and run.arm in (NO_CACHE, OWN_CACHE)
    ]
    if not others:
        raise ConfigError(f"prefills of {without} are learnt from other files; give one more")
    return replace(site, costs=learnt_costs(others, site.costs))


def show(rows: Sequence[Row]) -> None:
    """Print a table; times in ms, of the rounds the least and the most."""
    print(
        f"{'workload':<12}{'arm':<12}{'phase':<11}{'hits':>7}{'said':>7}{'points':>8}"
        f"{'p50':>7}{'rounds':>13}{'said':>7}{'ratio':>7}{'p90':>7}{'said':>7}"
    )
    for row in rows:
        least, most = (1e3 * each for each in (min(row.round_p50_s), max(row.round_p50_s)))
        times = f"{1e3 * row.p50_s:>7.0f}{f'{least:.0f}-{most:.0f}':>13}"
        print(
            f"{row.workload:<12}{row.arm:<12}{row.phase:<11}{row.hit:>7.1%}"
            f"{row.hit_predicted:>7.1%}{row.hit_points:>+8.2f}{times}"
            f"{1e3 * row.p50_predicted_s:>7.0f}{row.p50_ratio:>7.2f}{1e3 * row.p90_s:>7.0f}"
            f"{1e3 * row.p90_predicted_s:>7.0f}{'' if row.is_within else '  missed'}"
        )
    num_within = sum(row.is_within for row in rows)
    print(f"{num_within} of {len(rows)} within a point of hits and {TTFT_LIMIT:.0%} of the p50")


def validate(paths: Sequence[Path], storage: Path, script: Path, traces: Path) -> dict[str, object]:
    """The document. Raises ConfigError."""
    runs = {path.stem: read_runs(path) for path in paths}
    known = workloads(script)
    if unknown := sorted(runs.keys() - known.keys()):
        raise ConfigError(f"{script} has no {unknown[0]!r}; it has {', '.join(known)}")
    rows: list[Row] = []
    learnt = {}
    for name, found in runs.items():
        site = learnt_site(site_of(storage, found[0].block_size), runs, name)
        learnt[name] = {key: getattr(site.costs, key) for key in ("step_s", "token_s", "pair_s")}
        rows += rows_of(name, found, site, known[name], traces)
    show(rows)
    reads = site.serving(found[0].block_size, Setting.loads, num_tiers=2).media[1].reads
    return {
        "schema": "headstart.bench.tune_validate/1",
        "environment": describe(),
        "measured_on": json.loads(paths[0].read_text(encoding="utf-8"))["environment"],
        "settings": {
            "model": MODEL,
            "token_nbytes": site.block_nbytes(1),
            "pool_blocks": POOL_BLOCKS,
            "memory_nbytes": MEMORY_NBYTES,
            "file_nbytes": FILE_NBYTES,
            "copy_bytes_per_s": COPY_BYTES_PER_S,
            "read_bytes_per_s": None if reads is None else reads.bytes_per_s,
        },
        "prefill_without_the_file": learnt,
        "rows": [
            asdict(row)
            | {"hit_points": row.hit_points, "p50_ratio": row.p50_ratio, "within": row.is_within}
            for row in rows
        ],
    }


def main() -> int:
    """Run as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--traces", type=Path, default=HERE.parent.parent / "shared/data/traces")
    parser.add_argument("--storage", type=Path, default=HERE / "results/storage.json")
    parser.add_argument("--script", type=Path, default=HERE / "serve_arms.sh")
    options = parser.parse_args()
    files = options.files or sorted((HERE.parent / "build/serve_arms").glob("*.json"))
    if not files:
        print("nothing was measured: run benchmarks/serve_arms.sh first, and give its files")
        return 0
    try:
        document = validate(files, options.storage, options.script, options.traces)
    except HeadstartError as error:
        print(error, file=sys.stderr)
        return 2
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
