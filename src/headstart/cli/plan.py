"""`headstart plan`: size memory, storage and network before buying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from headstart import render
from headstart.cli.options import JsonTarget, grouped, parse_share
from headstart.errors import ConfigError

if TYPE_CHECKING:
    from headstart.costs import EngineCosts
    from headstart.sizing.architecture import Architecture
    from headstart.sizing.hardware import Hardware, Machine
    from headstart.sizing.load import Load

_T = TypeVar("_T")

EXIT_MISSED = 1

app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareOptions:
    """What is to be bought; over what a hardware file says."""

    hardware: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Hardware file (TOML); see docs/plan.md.")
    ] = None
    gpu: Annotated[str | None, typer.Option(help="Preset of the GPU.")] = None
    num_gpus: Annotated[int | None, typer.Option(help="GPUs of one engine.")] = None
    link: Annotated[
        str | None, typer.Option(help="Preset of a GPU's link to host memory, else its own.")
    ] = None
    drive: Annotated[str | None, typer.Option(help="Preset of a drive.")] = None
    num_drives: Annotated[int | None, typer.Option(help="Drives, as RAID0.")] = None
    network: Annotated[
        str | None, typer.Option(help="Preset of a port, where the drives are an array's.")
    ] = None
    num_ports: Annotated[int | None, typer.Option(help="Ports to the array.")] = None
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Measured reads a second, such as 10.3GB, instead."),
    ] = None
    engines: Annotated[int | None, typer.Option(help="Engines that share the storage.")] = None
    staging: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for KV on its way, of an engine.")
    ] = None
    mfu: Annotated[float | None, typer.Option(help="Share of the peak in prefills.")] = None
    gpu_hour: Annotated[float | None, typer.Option(help="Price of a GPU hour.")] = None
    storage_month: Annotated[float | None, typer.Option(help="Price of the storage.")] = None

    def read(self) -> Hardware:
        """The file's hardware, changed by the options that were given."""
        import msgspec

        from headstart.sizing.hardware import Hardware, read_hardware

        changes = {name: getattr(self, name) for name in _SAME_NAMES}
        changes |= {"num_engines": self.engines, "read_bytes_per_s": _bandwidth(self.bandwidth)}
        base = read_hardware(self.hardware) if self.hardware else Hardware()
        given = {name: value for name, value in changes.items() if value is not None}
        return msgspec.structs.replace(base, **given)


_SAME_NAMES = (
    *("gpu", "num_gpus", "link", "drive", "num_drives", "network", "num_ports", "staging"),
    *("mfu", "gpu_hour", "storage_month"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What is asked of the engines."""

    contexts: Annotated[
        str,
        typer.Option("--context", help="Prompt tokens: 32768, 8k:0.7,32k:0.3 or p50=8k,p99=64k."),
    ] = "8192"
    concurrency: Annotated[int, typer.Option(help="Requests at once, of each engine.")] = 16
    hit_share: Annotated[str, typer.Option(help="Share of each prompt's tokens that are held.")] = (
        "100%"
    )
    memory_share: Annotated[
        str, typer.Option(help="Share of the hits that host memory holds: no reads.")
    ] = "0%"
    output_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 256
    tpot: Annotated[str, typer.Option(help="Time of an output token, nothing else to do.")] = "30ms"
    pool_tokens: Annotated[
        int, typer.Option(help="Tokens to rebuild after all is lost; 0: 1,000 prompts.")
    ] = 0
    kv_dtype: Annotated[
        str, typer.Option(help="Of the KV: float32, bfloat16, float16, fp8, fp4.")
    ] = ""

    def parse(self) -> Load:
        """The load. Raises ConfigError."""
        from headstart.sizing.contexts import parse_contexts
        from headstart.sizing.load import Load
        from headstart.units import parse_seconds

        return Load(
            contexts=parse_contexts(self.contexts),
            concurrency=self.concurrency,
            hit_share=parse_share("--hit-share", self.hit_share),
            memory_share=parse_share("--memory-share", self.memory_share),
            output_tokens=self.output_tokens,
            tpot_s=_named("--tpot", parse_seconds, self.tpot),
            pool_tokens=self.pool_tokens,
            kv_dtype=self.kv_dtype,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the engine computes."""

    prefill: Annotated[
        str | None,
        typer.Option(help="Measured prefills instead of MFU: 1024=0.21,8192=1.9 (tokens=s)."),
    ] = None
    step: Annotated[
        str | None,
        typer.Option(help="Time of a step besides its tokens: what the engine's own hit takes."),
    ] = None
    step_tokens: Annotated[
        int, typer.Option(help="Prompt tokens of a step at most (max_num_batched_tokens).")
    ] = 8192

    def costs(self, model: Architecture, machine: Machine) -> EngineCosts:
        """What it takes to compute and to copy. Raises ConfigError."""
        from headstart.sizing.prefill import engine_costs
        from headstart.units import parse_seconds

        return engine_costs(
            model,
            machine,
            measured=parse_prefills(self.prefill),
            step_s=None if self.step is None else _named("--step", parse_seconds, self.step),
            max_step_tokens=self.step_tokens,
        )


@app.callback()
@grouped
def plan(
    context: typer.Context,
    bought: HardwareOptions,
    asked: LoadOptions,
    engine: EngineOptions,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME", help="A config.json, its folder, or a model of `plan presets`."
        ),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show every formula.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with plots.")
    ] = None,
    json: JsonTarget = None,
) -> None:
    """Say what DRAM, NVMe or an array must deliver so that a hit beats recomputing.

    Gives KV sizes, prefill times, the break-even bandwidth, TTFT and TPOT with and without hits
    under queueing, the staging memory, how long a lost pool takes to come back, and how many
    engines one storage feeds. Nothing is measured or downloaded; figures come from presets with
    their sources.
    """
    if context.invoked_subcommand is not None:
        _check_unused(context)
        return
    if model is None:
        raise ConfigError("--model is missing: give a config.json, or a name of `plan presets`")
    from headstart.cli.plan_tables import show_plan
    from headstart.sizing.configfile import read_model
    from headstart.sizing.documents import document
    from headstart.sizing.hardware import look_up
    from headstart.sizing.plan import make_plan
    from headstart.sizing.sizing import Sizing

    if html:
        from headstart.figure import check_installed

        if json not in (None, "-") and Path(str(json)).resolve() == html.resolve():
            raise ConfigError(f"--json and --html are both {html}: one would be lost; name two")
        check_installed()
        render.check_target(str(html), option="--html")
    render.check_target(json)
    machine, architecture = look_up(bought.read()), read_model(model)
    costs = engine.costs(architecture, machine)
    found = make_plan(Sizing(architecture, machine, asked.parse(), costs))
    render.publish(document(found), json, lambda: show_plan(found, explain=explain))
    if html:
        from headstart.sizing.report import page

        render.write_text(html, page(found), option="--html")


@app.command(name="reference")
def reference(
    explain: Annotated[bool, typer.Option("--explain", help="Explain every residual.")] = False,
    json: JsonTarget = None,
) -> None:
    """Predict a storage vendor's published tests, and show both.

    Exit code 0 all within their targets, 1 some are not for any bandwidth that is stated.
    """
    from headstart.cli.plan_tables import show_reference
    from headstart.sizing import reference as tests

    wave, lines = tests.fit(), [*tests.main_lines(), *tests.other_lines()]
    spread = tests.sensitivity()
    document = {
        "schema": "headstart.plan.reference/1",
        "model": tests.MODEL,
        "fitted_row": list(tests.FITTED),
        "context_tokens": wave.tokens,
        "lines": [
            {
                "what": line.what,
                "unit": line.unit,
                "printed": line.printed,
                "predicted": line.predicted,
                "error": line.error,
                "errors_over_range": list(line.errors),
                "target": line.target,
                "verdict": line.verdict.value,
                "why": line.why,
            }
            for line in lines
        ],
        "fitted_to_each_row": [
            {"row": row, "context_tokens": tokens, "worst_ttft": worst, "worst_ratio": ratio}
            for row, tokens, worst, ratio in spread
        ],
    }
    render.publish(document, json, lambda: show_reference(lines, spread, explain=explain))
    missed = any(line.verdict is tests.Verdict.MISSED for line in lines)
    raise typer.Exit(EXIT_MISSED if missed else 0)


@app.command(name="break-even")
def break_even(json: JsonTarget = None) -> None:
    """Break-even bandwidths of well-known models, from their configs."""
    from headstart.sizing.breakeven import LENGTHS, table

    rows = table()
    document = {
        "schema": "headstart.plan.break_even/1",
        "lengths": list(LENGTHS),
        "rows": [
            {
                "model": row.name,
                "kv_kib_per_token": row.kv_kib,
                "recompute_s": list(row.recompute_s),
                "break_even_gb_per_s": list(row.break_even),
            }
            for row in rows
        ],
    }
    titles = [render.Column(title="model"), render.Column(title="KV KiB/token", numeric=True)]
    titles += [render.Column(title=f"s at {n // 1024}K", numeric=True) for n in LENGTHS]
    titles += [render.Column(title=f"GB/s at {n // 1024}K", numeric=True) for n in LENGTHS]
    cells = [
        [row.name, f"{row.kv_kib:.4g}"]
        + [f"{value:.3g}" for value in (*row.recompute_s, *row.break_even)]
        for row in rows
    ]
    render.publish(document, json, lambda: render.print_table(titles, cells))


@app.command(name="presets")
def presets(json: JsonTarget = None) -> None:
    """List models and hardware that a plan knows by name, with their sources."""
    from headstart.cli.plan_tables import preset_rows

    rows = preset_rows()
    names = ("kind", "name", "figures", "source")
    document = {
        "schema": "headstart.plan.presets/1",
        "presets": [dict(zip(names, row, strict=True)) for row in rows],
    }
    columns = [render.Column(title=title) for title in names]
    render.publish(document, json, lambda: render.print_table(columns, rows))


def _check_unused(context: typer.Context) -> None:
    """Options before a subcommand would count for nothing. Raises ConfigError."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(
                f"{option.opts[0]} stands before `plan {context.invoked_subcommand}` and does "
                "nothing there; leave it out, or write it behind"
            )


def _bandwidth(text: str | None) -> float | None:
    from headstart.units import parse_nbytes

    if text is None:
        return None
    nbytes = _named("--bandwidth", parse_nbytes, text.removesuffix("/s"))
    if not nbytes:
        raise ConfigError(f"--bandwidth {text}: at no bandwidth nothing loads; give 10.3GB, say")
    return float(nbytes)


def _named(option: str, parse: Callable[[str], _T], text: str) -> _T:
    """What a text says, with errors that name its option."""
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def parse_prefills(text: str | None) -> list[tuple[int, float]]:
    """Measured prefills of `1024=0.21,8192=1.9`. Raises ConfigError."""
    found: list[tuple[int, float]] = []
    for part in (text or "").split(","):
        tokens, _, seconds = part.partition("=")
        if not part.strip():
            continue
        try:
            found.append((int(tokens), float(seconds)))
        except ValueError:
            raise ConfigError(
                f"--prefill {text!r}: write tokens=seconds, such as 1024=0.21,8192=1.9"
            ) from None
    if text is not None and not found:
        raise ConfigError("--prefill is empty: write tokens=seconds, such as 1024=0.21,8192=1.9")
    return found
