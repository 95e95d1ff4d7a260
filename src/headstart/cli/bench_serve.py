"""`headstart bench serve`: a load against a server."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from headstart import render
from headstart.cli.load_options import SendOptions, TraceOptions
from headstart.cli.options import JsonTarget, grouped

if TYPE_CHECKING:
    from headstart.bench.drive import Pace, Target
    from headstart.bench.load import Ask, Shape
    from headstart.bench.run import Request, Run

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
    from headstart.bench.drive import Target
    from headstart.bench.load import Shape, fingerprint, hit_rate, salted
    from headstart.bench.run import Run

    render.check_target(json)
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
    salt = secrets.token_hex(8) if salt is None else salt
    asks = traced.asks(workload, shape)
    asked = salted(asks, salt, shape)
    target = Target(url=url.rstrip("/"), model=model, api_key=api_key)
    pace = sending.pace(asks, rate, concurrency, seed)
    _warm_up(asks[:warm_up], target, shape)
    requests, seconds = _drive(asked, target, pace, workload)
    run = Run(
        tool="headstart",
        duration_s=seconds,
        requests=tuple(requests),
        arm=arm,
        has_prefix_cache=prefix_cache,
        pace={**pace.told(), **traced.told(), "think_s": think},
        block_size=block_size,
        prompts=fingerprint(asks),
        simulated_hit_rate=hit_rate(asked, block_size),
        workload=workload,
        salt=salt,
    )
    _publish(run, json)


def _warm_up(asks: list[Ask], target: Target, shape: Shape) -> None:
    """Let a server compile and allocate, with prompts that nobody asks again."""
    from headstart.bench.drive import Pace
    from headstart.bench.load import salted
    from headstart.bench.processes import send

    if asks:
        at_once = [replace(ask, think_s=0.0) for ask in asks]
        send(salted(at_once, secrets.token_hex(8), shape), target, Pace(concurrency=1))


def _drive(asks: list[Ask], target: Target, pace: Pace, title: str) -> tuple[list[Request], float]:
    from headstart.bench.processes import send

    with render.progress("bench serve") as progress:
        return send(asks, target, pace, lambda done: progress(title, done, len(asks)))


def _publish(run: Run, json: str | None) -> None:
    import msgspec

    render.publish(msgspec.to_builtins(run), json, lambda: _show(run))
    if len(run.good) < len(run.requests):
        raise typer.Exit(EXIT_FINDING)


def _show(run: Run) -> None:
    good = run.good
    rows = [("requests", str(len(run.requests))), ("failed", str(len(run.requests) - len(good)))]
    if good:
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            tpot_s = run.tpot_s(share)
            rows.append((f"TTFT {name}, ms", f"{run.ttft_s(share) * 1000:.1f}"))
            if tpot_s is not None:
                rows.append((f"TPOT {name}, ms", f"{tpot_s * 1000:.1f}"))
        rows.append(("output, tokens/s", f"{run.output_tokens_per_s:.1f}"))
        hit_rate, lag_s = run.hit_rate, run.send_lag_s or 0.0
        rows.append(("hits, of the tokens", "not told" if hit_rate is None else f"{hit_rate:.1%}"))
        rows.append(("hits that are possible", f"{run.simulated_hit_rate or 0.0:.1%}"))
        rows.append(("sent late, p99, ms", f"{lag_s * 1000:.1f}"))
    first = next((r.error for r in run.requests if r.error), None)
    if first:
        rows.append(("first error", first))
    rows.append(("salt", run.salt))
    render.print_table([render.Column(title="bench serve"), render.Column(title="")], rows)
