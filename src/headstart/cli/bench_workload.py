"""`headstart bench workload`: what a load asks, and the same for other load generators."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart import render
from headstart.cli.bench_serve import Sessions
from headstart.cli.load_options import ShapeOptions, TraceOptions
from headstart.cli.options import JsonTarget, grouped

if TYPE_CHECKING:
    from headstart.bench.load import Ask

SCHEMA = "headstart.bench.workload/1"


@grouped
def workload(
    shaped: ShapeOptions,
    traced: TraceOptions,
    sessions: Sessions = 16,
    rate: Annotated[
        float, typer.Option(min=1e-6, help="Sessions that start a second, where no trace tells.")
    ] = 1.0,
    jsonl: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the load here as a Mooncake trace.")
    ] = None,
    json: JsonTarget = None,
) -> None:
    """Show what a load asks and how much of it can be hit, and write it for other tools.

    With --jsonl, one line a request: its timestamp in milliseconds, its lengths, and the ids of its
    blocks of --block-size tokens. `vllm bench serve`, AIPerf and GuideLLM replay such files, with
    texts of their own: nothing is salted here. Nothing is sent.
    """
    from headstart.bench.drive import Pace, starts_of
    from headstart.bench.export import scheduled, write_mooncake

    render.check_target(json)
    asks = traced.asks(shaped.workload, shaped.shape(sessions))
    timed = scheduled(asks, starts_of(asks, Pace(rate=rate, seed=shaped.seed)))
    if jsonl is not None:
        write_mooncake(jsonl, timed, shaped.block_size)
    span_s = timed[-1][0] - timed[0][0]
    document = _described([ask for _, ask in timed], span_s, shaped.block_size)
    document = {"schema": SCHEMA, "workload": shaped.workload, **document}
    render.publish(document, json, lambda: _show(document))


def _described(asks: list[Ask], span_s: float, block_size: int) -> dict[str, Any]:
    from headstart.bench.load import hit_rate
    from headstart.bench.statistics import quantile

    lengths = [len(ask.tokens) for ask in asks]
    return {
        "requests": len(asks),
        "sessions": len({ask.session for ask in asks}),
        "span_s": span_s,
        "prompt_tokens": sum(lengths),
        "prompt_tokens_p50": quantile(lengths, 0.5),
        "prompt_tokens_max": max(lengths),
        "output_tokens": sum(ask.max_tokens for ask in asks),
        "block_size": block_size,
        "simulated_hit_rate": hit_rate(asks, block_size),
    }


def _show(document: dict[str, Any]) -> None:
    rows = [
        ("requests", f"{document['requests']:,}"),
        ("sessions", f"{document['sessions']:,}"),
        ("from first to last, s", f"{document['span_s']:.1f}"),
        ("prompt tokens", f"{document['prompt_tokens']:,}"),
        ("prompt tokens, p50", f"{document['prompt_tokens_p50']:,}"),
        ("prompt tokens, most", f"{document['prompt_tokens_max']:,}"),
        ("output tokens", f"{document['output_tokens']:,}"),
        ("hits that are possible", f"{document['simulated_hit_rate']:.1%}"),
    ]
    render.print_table([render.Column(title="bench workload"), render.Column(title="")], rows)
