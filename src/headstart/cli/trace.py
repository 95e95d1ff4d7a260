"""`headstart trace`: what a trace is like, and the same in another form or smaller."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart import render
from headstart.cli.options import JsonTarget, grouped, parse_share
from headstart.errors import ConfigError

if TYPE_CHECKING:
    from headstart.traces.reading import Broken
    from headstart.tuner.recorded import Recorded

app = typer.Typer(help="Traces of what a service was asked.", no_args_is_help=True)

WRITTEN_SCHEMA = "headstart.trace.written/1"
TraceFile = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        help="File (.gz, .tar.gz, too) or folder: Mooncake, WEKA, token ids, texts, Headstart.",
    ),
]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="File to write; .gz packs it.")]
Form = Annotated[str, typer.Option(help="What to write: headstart or mooncake.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a trace is read."""

    block_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens a block, a multiple of the trace's; default: those."),
    ] = None
    trace_block_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens a hash id stands for, if not 512 (Mooncake only)."),
    ] = None
    trace_unit: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="What its times count, such as 1s, if not 1ms (as above)."
        ),
    ] = None
    rate: Annotated[
        float, typer.Option(min=1e-6, help="Sessions that start a second, if no times are told.")
    ] = 1 / 60
    seed: Annotated[int, typer.Option(min=0, help="Of made-up times, and of a sample.")] = 0

    def read(self, path: Path, share: float = 1.0) -> tuple[Recorded, Broken]:
        """The trace, or a share of its sessions, with progress, and what could not be read.

        Raises ConfigError.
        """
        from headstart.traces.reading import Broken
        from headstart.tuner.recorded import record
        from headstart.units import parse_seconds

        broken = Broken()
        with render.progress("reading") as advance:
            recorded = record(
                path,
                block_size=self.block_size,
                trace_block_size=self.trace_block_size,
                unit_s=None if self.trace_unit is None else parse_seconds(self.trace_unit),
                sessions_per_s=self.rate,
                seed=self.seed,
                share=share,
                broken=broken,
                advance=lambda done: advance(f"reading, {done:,} requests", 0, 1),
            )
        return recorded, broken


def broken_document(broken: Broken) -> dict[str, Any]:
    """What could not be read, as JSON has it."""
    return {"count": broken.count, "first": broken.first}


def show_broken(document: dict[str, Any]) -> None:
    """Print it, if anything."""
    if document["count"]:
        print(f"not read: {document['count']:,} lines or documents, such as")
        for message in document["first"]:
            print(f"  {message}")


@app.command()
@grouped
def info(read: ReadOptions, trace: TraceFile, json: JsonTarget = None) -> None:
    """Show sizes, times, sessions, and the hits of a cache that forgets nothing."""
    from headstart.tuner.facts import INFO_SCHEMA
    from headstart.tuner.facts import info as described

    render.check_target(json)
    recorded, broken = read.read(trace)
    document = {
        "schema": INFO_SCHEMA,
        **described(recorded),
        "broken": broken_document(broken),
    }
    render.publish(document, json, lambda: _show_info(document))


@app.command()
@grouped
def convert(
    read: ReadOptions,
    trace: TraceFile,
    out: Target,
    to: Form = "headstart",
    json: JsonTarget = None,
) -> None:
    """Write a trace in Headstart's form or Mooncake's: only which prompts begin alike, no text."""
    _check_targets(trace, out, to, json)
    recorded, broken = read.read(trace)
    _write(recorded, broken, out, to, json)


@app.command()
@grouped
def sample(
    read: ReadOptions,
    trace: TraceFile,
    out: Target,
    share: Annotated[str, typer.Option(help="Of the sessions, such as 10%.")],
    to: Form = "headstart",
    json: JsonTarget = None,
) -> None:
    """Write some of a trace's sessions, each whole: requests left out at random would spoil hits.

    Where a trace does not tell its sessions, they are the prompts that begin alike beyond what many
    have in common.
    """
    wanted = parse_share("--share", share)
    _check_targets(trace, out, to, json)
    recorded, broken = read.read(trace, wanted)
    _write(recorded, broken, out, to, json)


def _check_targets(trace: Path, out: Path, to: str, json: str | None) -> None:
    """Raises ConfigError for what cannot be written, before a trace is read."""
    from headstart.tuner.writing import check_form

    check_form(to)
    render.check_target(f"{out}", option="OUT")
    render.check_target(json)
    places = [out.resolve(), *([] if json in (None, "-") else [Path(f"{json}").resolve()])]
    if trace.resolve() in places or len(set(places)) < len(places):
        raise ConfigError("TRACE, OUT and --json have to be different files: one would be lost")


def _write(recorded: Recorded, broken: Broken, out: Path, to: str, json: str | None) -> None:
    from headstart.tuner.facts import infinite, infinite_document
    from headstart.tuner.writing import write_trace

    write_trace(out, recorded, to)
    document: dict[str, Any] = {
        "schema": WRITTEN_SCHEMA,
        "file": f"{out}",
        "form": to,
        "requests": len(recorded),
        "sessions": len(set(recorded.session.tolist())),
        "input_tokens": int(recorded.input_tokens.sum()),
        "infinite_hit": infinite_document(infinite(recorded)),
        "broken": broken_document(broken),
    }
    render.publish(document, json, lambda: _show_written(document))


def _show_written(document: dict[str, Any]) -> None:
    rows = [
        ("written", f"{document['file']}, as {document['form']}"),
        ("requests", f"{document['requests']:,}"),
        ("sessions", f"{document['sessions']:,}"),
        ("prompt tokens", f"{document['input_tokens']:,}"),
        *_infinite_rows(document),
    ]
    render.print_table([render.Column(title="trace"), render.Column(title="")], rows)
    show_broken(document["broken"])


def _infinite_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    hits = document["infinite_hit"]
    return [
        ("tokens that can be hit, from a cold start", f"{hits['tokens_cold']:.2%}"),
        ("tokens that can be hit, last half of requests", f"{hits['tokens_last_half']:.2%}"),
    ]


def _show_info(document: dict[str, Any]) -> None:
    told = {True: "", False: ", made up"}
    alike = "" if document["sessions_told"] else ", by how prompts begin"
    waits = document["reuse_s_quantiles"]
    rows = [
        ("kind", document["kind"]),
        ("requests", f"{document['requests']:,}"),
        ("sessions", f"{document['sessions']:,}{alike}"),
        ("from first to last, s", f"{document['span_s']:,.1f}{told[document['times_told']]}"),
        ("prompt tokens", f"{document['input_tokens']:,}"),
        ("a prompt", _spread(document["input_tokens_quantiles"])),
        ("an answer", _spread(document["output_tokens_quantiles"])),
        ("block size", f"{document['block_size']:,}"),
        ("blocks", f"{document['blocks']:,}, {document['unique_blocks']:,} different"),
        ("different tokens", f"{document['unique_tokens']:,}"),
        ("blocks used once", f"{document['used_once']:.1%}"),
        ("requests that can hit", f"{document['requests_with_hit']:.1%}"),
        *_infinite_rows(document),
    ]
    if waits is not None:
        rows.append(("until a block is used again, s", _spread(waits)))
    if document["unchained_ids"]:
        rows.append(("ids after other ids than at first", f"{document['unchained_ids']:,}"))
    render.print_table([render.Column(title="trace"), render.Column(title="")], rows)
    show_broken(document["broken"])


def _spread(quantiles: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,.0f}" for name, value in quantiles.items())
