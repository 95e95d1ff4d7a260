"""`headstart bench serve`: a load against a server."""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart import render
from headstart.cli.bench_report import ReportOptions
from headstart.cli.load_options import SendOptions, ShapeOptions, TraceOptions
from headstart.cli.options import JsonTarget, grouped
from headstart.errors import ConfigError

if TYPE_CHECKING:
    from headstart.bench.campaign import Plan
    from headstart.bench.run import Run
    from headstart.bench.serve import Load
    from headstart.bench.served import Served
    from headstart.bench.slo import Slo

EXIT_FINDING = 1
EXIT_SIGNALLED = 128
DEFAULT_URL = "http://127.0.0.1:8000"
Told = Mapping[str, Any]
"""A command's options by their names, as typer has checked them."""

Url = Annotated[str, typer.Option(help="The server, up to and without /v1.")]
Model = Annotated[str, typer.Option(help="The model's name; its only one by default.")]
ApiKey = Annotated[
    str, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Where the server asks.")
]
Sessions = Annotated[int, typer.Option(min=1, help="Sessions, each with its own text.")]
Rate = Annotated[
    float | None, typer.Option(min=1e-6, help="Open loop: sessions that start a second.")
]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="Closed loop: sessions at once; 1 by default.")
]
Salt = Annotated[
    str | None,
    typer.Option(help="Makes the prompts new to the server: one for both runs of a pair."),
]
Arms = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        metavar="NAME[=WHAT]",
        help="What is measured. WHAT is a server that is started for it: none (vLLM without its "
        "prefix cache), gpu-prefix (with it), headstart (and the connector, with a node of its "
        "own), a JSON object for --kv-transfer-config, or any server's command in quotes, with "
        "{port} where its port goes. May be given several times. Without WHAT: the name of what "
        "is at --url.",
    ),
]
ServeModel = Annotated[
    str, typer.Option(help="The model that arms of vLLM serve: its name or folder.")
]
ServeWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- VLLM_ARGS]", help="After a lone --: more arguments for `vllm serve`."
    ),
]
Rounds = Annotated[
    int, typer.Option(min=1, help="Runs of each arm and phase, in turn: a pair a round.")
]
Phases = Annotated[
    str,
    typer.Option(
        help="Send the load once after each of: cold (all caches emptied), steady (nothing done), "
        "engine-restart, node-restart, host-cold (both, and the page cache dropped)."
    ),
]
OneAtATime = Annotated[
    bool,
    typer.Option(
        "--one-at-a-time", help="Start an arm for each round and end it after: saves memory."
    ),
]
Root = Annotated[
    Path, typer.Option(help="Folder for the arms' logs and blocks, which are removed again.")
]
NodeConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Settings of the arms' nodes; each has folders of its own in the tiers' roots.",
    ),
]
StartLimit = Annotated[
    float, typer.Option(min=1.0, help="Seconds that a server may take to come up.")
]
WarmUp = Annotated[int, typer.Option(min=0, help="Requests to a new server, not counted.")]
PrefixCache = Annotated[
    bool | None,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Whether the engine's own prefix cache is on, where that is not known from the arm; "
        "`headstart gate` wants to know.",
    ),
]


def base_url(url: str) -> str:
    """Up to and without /v1, also where other tools' base URL was given."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def end_on_signals() -> None:
    """Ended from outside, a command still ends what it started and keeps what it has."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(EXIT_SIGNALLED + number))


@grouped
def serve(
    context: typer.Context,
    shaped: ShapeOptions,
    traced: TraceOptions,
    sending: SendOptions,
    shown: ReportOptions,
    serve_words: ServeWords = None,
    url: Url = DEFAULT_URL,
    model: Model = "",
    api_key: ApiKey = "",
    sessions: Sessions = 16,
    rate: Rate = None,
    concurrency: Concurrency = None,
    salt: Salt = None,
    arm: Arms = None,
    serve_model: ServeModel = "",
    rounds: Rounds = 1,
    phases: Phases = "",
    one_at_a_time: OneAtATime = False,
    root: Root = Path("build/bench"),
    node_config: NodeConfig = None,
    start_limit: StartLimit = 600.0,
    warm_up: WarmUp = 2,
    prefix_cache: PrefixCache = None,
    json: JsonTarget = None,
) -> None:
    """Drive a load against OpenAI-compatible streaming servers, and time every request.

    Prompts are token ids. Times to the first token count from when a request should have been
    sent. The result is a run for `headstart gate`: give both runs of a pair the same --salt, and
    each pair another one. With --arm NAME=WHAT the servers are started here and measured in turn,
    and all runs are in one file, for `headstart gate --baseline FILE#ARM/PHASE`.

    Exit code 1 when a request failed.
    """
    told = context.params
    render.check_target(json)
    slo = shown.checked()
    load, plan = _load(told, shaped, traced, sending), _plan(told)
    is_one = rounds == 1 and not phases and not _made(told)
    runs: list[Run] = []
    with _served(told, plan) as arms:
        _run(arms, load, plan, runs, Kept(json=json, is_one=is_one, slo=slo))
    shown.write(runs, slo)
    if any(len(run.good) < len(run.requests) for run in runs):
        raise typer.Exit(EXIT_FINDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """How runs are kept."""

    json: str | None
    is_one: bool
    """Whether there will be only one: it is kept as it is."""
    slo: Slo

    def document(self, runs: Sequence[Run]) -> dict[str, object]:
        """For JSON: a run, or several with what they were measured on."""
        import msgspec

        from headstart.bench.environment import describe
        from headstart.bench.run import SCHEMA
        from headstart.bench.summary import slo_document, summarise

        found = [msgspec.to_builtins(run) for run in runs]
        if self.slo.limits:
            for run, one in zip(runs, found, strict=True):
                one["slo"] = slo_document(summarise(run, self.slo))
        if self.is_one:
            return dict(found[0])
        return {"schema": SCHEMA, "environment": describe(), "runs": found}


def _run(arms: Sequence[Served], load: Load, plan: Plan, runs: list[Run], kept: Kept) -> None:
    """Run the plan; what is done when it fails is published, too."""
    from headstart.bench.campaign import run_campaign
    from headstart.cli.bench_runs import show_runs

    def keep(run: Run) -> None:
        runs.append(run)
        render.save(kept.document(runs), kept.json)

    def show() -> None:
        show_runs(runs, kept.slo, is_one=kept.is_one)

    try:
        with render.progress("bench serve") as progress:
            run_campaign(arms, load, plan, keep, progress)
    finally:
        if runs:
            render.publish(kept.document(runs), kept.json, show)


def _load(told: Told, shaped: ShapeOptions, traced: TraceOptions, sending: SendOptions) -> Load:
    from headstart.bench.serve import Load

    shape = shaped.shape(told["sessions"])
    asks = traced.asks(shaped.workload, shape)
    return Load(
        workload=shaped.workload,
        shape=shape,
        pace=sending.pace(asks, told["rate"], told["concurrency"], shaped.seed),
        asks=tuple(asks),
        block_size=shaped.block_size,
        num_warm_up=told["warm_up"],
        told=traced.told(),
    )


def _plan(told: Told) -> Plan:
    from headstart.bench.campaign import Plan
    from headstart.bench.phases import parse_phases

    if told["salt"] == "":
        raise ConfigError("--salt is empty; leave it out for one that nobody has used")
    return Plan(
        phases=parse_phases(told["phases"]),
        num_rounds=told["rounds"],
        one_at_a_time=told["one_at_a_time"],
        salt=secrets.token_hex(8) if told["salt"] is None else told["salt"],
    )


def _made(told: Told) -> list[str]:
    """The arms that are started here. Raises ConfigError."""
    from headstart.bench.arms import check_name

    arms = told["arm"] or []
    made = [arm for arm in arms if "=" in arm]
    for name in set(arms) - set(made):
        check_name(name)
    if len(made) < len(arms) and len(arms) > 1:
        raise ConfigError(
            "--arm without =WHAT names the one server at --url; give each of several arms what is "
            "served: --arm NAME=WHAT"
        )
    if made and told["url"] != DEFAULT_URL:
        raise ConfigError("--url is a server that runs, --arm NAME=WHAT one to start: name one")
    return made


@contextmanager
def _served(told: Told, plan: Plan) -> Iterator[Sequence[Served]]:
    """The server at --url, or the arms, which are ended after the block. Raises ConfigError."""
    from headstart.bench.arms import Vllm, parse_arms
    from headstart.bench.drive import Target
    from headstart.bench.phases import check_phases
    from headstart.bench.serve import check_installed
    from headstart.bench.served import Place, RemoteServer, arms_served

    target = Target(url=base_url(told["url"]), model=told["model"], api_key=told["api_key"])
    made, has_cache = _made(told), told["prefix_cache"]
    vllm = Vllm(model=told["serve_model"], words=tuple(told["serve_words"] or ()))
    arms = parse_arms(made, vllm, has_prefix_cache=has_cache)
    check_phases(plan.phases, arms)
    check_installed()
    end_on_signals()
    if not arms:
        yield [RemoteServer(target, "".join(told["arm"] or ()), has_prefix_cache=has_cache)]
        return
    place = Place(root=told["root"], node_config=told["node_config"], start_s=told["start_limit"])
    with arms_served(arms, place, target) as served:
        yield served
