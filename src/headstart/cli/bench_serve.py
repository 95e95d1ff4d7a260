"""`headstart bench serve`: a load against a server."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated

import typer

from headstart import render
from headstart.cli.bench_report import ReportOptions
from headstart.cli.load_options import SendOptions, TraceOptions
from headstart.cli.options import JsonTarget, grouped

if TYPE_CHECKING:
    from headstart.bench.drive import Target
    from headstart.bench.run import Run
    from headstart.bench.serve import Load
    from headstart.bench.slo import Slo
    from headstart.bench.summary import Summary

EXIT_FINDING = 1

Url = Annotated[str, typer.Option(help="The server, up to and without /v1.")]
Model = Annotated[str, typer.Option(help="The model's name; its only one by default.")]
ApiKey = Annotated[
    str, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Where the server asks.")
]
Workload = Annotated[
    str,
    typer.Option(
        help="shared-prefix, multi-turn, rag, unique (nothing to hit), or with --trace: trace, "
        "agentic (sessions with pauses)."
    ),
]
Sessions = Annotated[int, typer.Option(min=1, help="Sessions, each with its own text.")]
Turns = Annotated[int, typer.Option(min=1, help="Turns of a session of multi-turn.")]
SharedTokens = Annotated[
    int, typer.Option(min=0, help="Tokens that sessions share: system prompt, documents.")
]
OwnTokens = Annotated[int, typer.Option(min=1, help="Tokens of a question.")]
OutputTokens = Annotated[int, typer.Option(min=1, help="Tokens of each answer.")]
Documents = Annotated[int, typer.Option(min=1, help="Documents of rag.")]
Rate = Annotated[
    float | None, typer.Option(min=1e-6, help="Open loop: sessions that start a second.")
]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="Closed loop: sessions at once; 1 by default.")
]
Think = Annotated[float, typer.Option(min=0.0, help="Seconds between turns.")]
Seed = Annotated[int, typer.Option(help="Of texts and arrivals.")]
Salt = Annotated[
    str | None,
    typer.Option(help="Makes the prompts new to the server: one for both runs of a pair."),
]
Arm = Annotated[str, typer.Option(help="What is measured, for the result.")]
BlockSize = Annotated[
    int, typer.Option(min=1, help="The server's block, for the hit rate that is possible.")
]
Vocabulary = Annotated[int, typer.Option(min=30, help="Token ids are smaller than this.")]
WarmUp = Annotated[int, typer.Option(min=0, help="Requests before, which are not counted.")]
PrefixCache = Annotated[
    bool | None,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Whether the engine's own prefix cache is on; `headstart gate` wants to know.",
    ),
]


@grouped
def serve(
    traced: TraceOptions,
    sending: SendOptions,
    shown: ReportOptions,
    url: Url = "http://127.0.0.1:8000",
    model: Model = "",
    api_key: ApiKey = "",
    workload: Workload = "multi-turn",
    sessions: Sessions = 16,
    turns: Turns = 4,
    shared_tokens: SharedTokens = 1024,
    own_tokens: OwnTokens = 256,
    output_tokens: OutputTokens = 32,
    documents: Documents = 8,
    rate: Rate = None,
    concurrency: Concurrency = None,
    think: Think = 0.0,
    seed: Seed = 0,
    salt: Salt = None,
    arm: Arm = "",
    block_size: BlockSize = 16,
    vocabulary: Vocabulary = 30_000,
    warm_up: WarmUp = 2,
    prefix_cache: PrefixCache = None,
    json: JsonTarget = None,
) -> None:
    """Drive a load against an OpenAI-compatible streaming server, and time every request.

    Prompts are token ids. Times to the first token count from when a request should have been
    sent. The result is a run for `headstart gate`: give both runs of a pair the same --salt, and
    each pair another one.

    Exit code 1 when a request failed.
    """
    from msgspec import structs

    from headstart.bench.drive import Target
    from headstart.bench.load import Shape
    from headstart.bench.serve import Load

    render.check_target(json)
    slo = shown.checked()
    shape = Shape(
        sessions=sessions,
        turns=turns,
        shared_tokens=shared_tokens,
        own_tokens=own_tokens,
        output_tokens=output_tokens,
        documents=documents,
        think_s=think,
        seed=seed,
        vocabulary=vocabulary,
    )
    asks = traced.asks(workload, shape)
    load = Load(
        workload=workload,
        shape=shape,
        pace=sending.pace(asks, rate, concurrency, seed),
        asks=asks,
        block_size=block_size,
        told=traced.told(),
    )
    target = Target(url=url.rstrip("/"), model=model, api_key=api_key)
    run = _run(load, target, secrets.token_hex(8) if salt is None else salt, warm_up)
    run = structs.replace(run, arm=arm, has_prefix_cache=prefix_cache)
    _publish(run, json, slo)
    shown.write([run], slo)
    if len(run.good) < len(run.requests):
        raise typer.Exit(EXIT_FINDING)


def _run(load: Load, target: Target, salt: str, num_warm_up: int) -> Run:
    from headstart.bench.serve import measure, warm_up

    warm_up(load, target, num_warm_up)
    with render.progress("bench serve") as progress:
        count = len(load.asks)
        return measure(load, target, salt, lambda done: progress(load.workload, done, count))


def _publish(run: Run, json: str | None, slo: Slo) -> None:
    import msgspec

    from headstart.bench.summary import slo_document, summarise

    summary = summarise(run, slo)
    document = msgspec.to_builtins(run)
    if slo.limits:
        document["slo"] = slo_document(summary)
    render.publish(document, json, lambda: _show(run, summary))


def _show(run: Run, summary: Summary) -> None:
    from headstart.bench.summary import figures

    rows = list(figures(summary))
    first = next((r.error for r in run.requests if r.error), None)
    if first:
        rows.append(("first error", first))
    if summary.slo.note:
        rows.append(("note", summary.slo.note))
    rows.append(("salt", run.salt))
    render.print_table([render.Column(title="bench serve"), render.Column(title="")], rows)
