"""`headstart bench serve`: a load against a server."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Annotated

import typer

from headstart import render
from headstart.cli.options import JsonTarget

if TYPE_CHECKING:
    from headstart.bench.run import Run

EXIT_FINDING = 1


def serve(
    url: Annotated[str, typer.Option(help="The server, up to and without /v1.")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[str, typer.Option(help="The model's name; its only one by default.")] = "",
    workload: Annotated[
        str, typer.Option(help="shared-prefix, multi-turn, rag, or unique (nothing to hit).")
    ] = "multi-turn",
    sessions: Annotated[int, typer.Option(min=1, help="Sessions, each with its own text.")] = 16,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a session of multi-turn.")] = 4,
    shared_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens that sessions share: system prompt, documents.")
    ] = 1024,
    own_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a question.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 32,
    documents: Annotated[int, typer.Option(min=1, help="Documents of rag.")] = 8,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Open loop: sessions that start a second.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: sessions at once; 1 by default.")
    ] = None,
    think: Annotated[float, typer.Option(min=0.0, help="Seconds between turns.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of texts and arrivals.")] = 0,
    salt: Annotated[
        str | None,
        typer.Option(help="Makes the prompts new to the server: one for both runs of a pair."),
    ] = None,
    arm: Annotated[str, typer.Option(help="What is measured, for the result.")] = "",
    block_size: Annotated[
        int, typer.Option(min=1, help="The server's block, for the hit rate that is possible.")
    ] = 16,
    vocabulary: Annotated[
        int, typer.Option(min=30, help="Token ids are smaller than this.")
    ] = 30_000,
    warm_up: Annotated[
        int, typer.Option(min=0, help="Requests before, which are not counted.")
    ] = 2,
    json: JsonTarget = None,
) -> None:
    """Drive a load against an OpenAI-compatible streaming server, and time every request.

    Prompts are token ids. Times to the first token count from when a request should have been
    sent. The result is a run for `headstart gate`: give both runs of a pair the same --salt, and
    each pair another one. An API key is taken from OPENAI_API_KEY.

    Exit code 1 when a request failed.
    """
    import asyncio

    from headstart.bench.drive import Pace, Target, drive
    from headstart.bench.load import Shape, fingerprint, make_load, salted, theoretical_hits
    from headstart.bench.run import Run

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
    asks = make_load(workload, shape)
    salt = secrets.token_hex(8) if salt is None else salt
    asked = salted(asks, salt, shape)
    target = Target(url=url.rstrip("/"), model=model, api_key=os.environ.get("OPENAI_API_KEY", ""))
    pace = Pace(rate=rate, concurrency=concurrency or (None if rate else 1), seed=seed)
    if warm_up:
        first = salted(asks[:warm_up], secrets.token_hex(8), shape)
        asyncio.run(drive(first, target, Pace(concurrency=1)))
    with render.progress("bench serve") as progress:
        requests, seconds = asyncio.run(
            drive(asked, target, pace, lambda done: progress(workload, done, len(asked)))
        )
    hits = sum(theoretical_hits(asked, block_size))
    run = Run(
        tool="headstart",
        duration_s=seconds,
        requests=tuple(requests),
        arm=arm,
        prompts=fingerprint(asks),
        simulated_hit_rate=hits / sum(len(ask.tokens) for ask in asked),
        workload=workload,
        salt=salt,
    )
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
