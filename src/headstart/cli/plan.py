"""`headstart plan`: size memory, storage and network before buying."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart import render
from headstart.cli.options import JsonTarget, grouped, parse_share
from headstart.errors import ConfigError

if TYPE_CHECKING:
    from headstart.costs import EngineCosts
    from headstart.sizing.architecture import Architecture
    from headstart.sizing.hardware import Hardware, Machine
    from headstart.sizing.load import Load
    from headstart.sizing.plan import Plan
    from headstart.sizing.reference import Line

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
            tpot_s=parse_seconds(self.tpot),
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
            step_s=None if self.step is None else parse_seconds(self.step),
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
        return
    if model is None:
        raise ConfigError("--model is missing: give a config.json, or a name of `plan presets`")
    from headstart.sizing.configfile import read_model
    from headstart.sizing.documents import document
    from headstart.sizing.hardware import look_up
    from headstart.sizing.plan import make_plan
    from headstart.sizing.sizing import Sizing

    if html:
        from headstart.figure import check_installed

        check_installed()
        render.check_target(str(html), option="--html")
    render.check_target(json)
    machine, architecture = look_up(bought.read()), read_model(model)
    costs = engine.costs(architecture, machine)
    found = make_plan(Sizing(architecture, machine, asked.parse(), costs))
    render.publish(document(found), json, lambda: _show(found, explain=explain))
    if html:
        from headstart.sizing.report import page

        render.write_text(html, page(found), option="--html")


@app.command(name="reference")
def reference(
    explain: Annotated[bool, typer.Option("--explain", help="Explain every residual.")] = False,
    json: JsonTarget = None,
) -> None:
    """Predict a storage vendor's published tests, and show both.

    Exit code 0 all within their targets, 1 some are not.
    """
    from headstart.sizing import reference as tests

    wave = tests.fit()
    lines = [*tests.lines(wave), *tests.other_lines()]
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
                "target": line.target,
                "fitted": line.fitted,
                "met": line.is_met,
                "why": line.why,
            }
            for line in lines
        ],
        "fitted_to_each_row": [
            {"row": row, "context_tokens": tokens, "worst_ttft": worst, "worst_ratio": ratio}
            for row, tokens, worst, ratio in spread
        ],
    }
    render.publish(document, json, lambda: _show_reference(lines, spread, explain=explain))
    raise typer.Exit(EXIT_MISSED if any(not line.is_met for line in lines) else 0)


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
    from headstart.sizing.configfile import known_models
    from headstart.sizing.hardware import presets as known

    found = known()
    groups: dict[str, dict[str, Any]] = {
        "gpu": found.gpus,
        "link": found.links,
        "drive": found.drives,
        "network": found.networks,
    }
    rows = [["model", name, ""] for name in known_models()]
    rows += [
        [kind, name, part.source] for kind, group in groups.items() for name, part in group.items()
    ]
    rows += [["RAID0", f"{found.raid0.efficiency:g}", found.raid0.source]]
    rows += [["MFU", "", found.mfu.source]]
    document = {
        "schema": "headstart.plan.presets/1",
        "presets": [{"kind": kind, "name": name, "source": text} for kind, name, text in rows],
    }
    columns = [render.Column(title=title) for title in ("kind", "name", "source")]
    render.publish(document, json, lambda: render.print_table(columns, rows))


def _bandwidth(text: str | None) -> float | None:
    from headstart.units import parse_nbytes

    if text is None:
        return None
    nbytes = parse_nbytes(text.removesuffix("/s"))
    if not nbytes:
        raise ConfigError(f"--bandwidth {text}: at no bandwidth nothing loads; give 10.3GB, say")
    return float(nbytes)


def parse_prefills(text: str | None) -> list[tuple[int, float]]:
    """Measured prefills of `1024=0.21,8192=1.9`. Raises ConfigError."""
    found = []
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
    return found


def _show(plan: Plan, *, explain: bool) -> None:
    columns = [render.Column(title=plan.model.name), render.Column(title="", numeric=True)]
    if explain:
        columns.append(render.Column(title="formula"))
    rows = [
        [each.title, each.shown, each.formula] if explain else [each.title, each.shown]
        for each in plan.answers
    ]
    render.print_table(columns, rows)
    print()
    tokens = render.Column(title="tokens", numeric=True)
    flips = render.Column(title="loading wins up to so many at once", numeric=True)
    render.print_table([tokens, flips], [[f"{n:,}", f"{count:,}"] for n, count in plan.flips])
    if explain:
        print()
        render.print_table(
            [render.Column(title="sources")], [[source] for source in plan.machine.sources]
        )


def _show_reference(
    lines: list[Line], spread: list[tuple[str, float, float, float]], *, explain: bool
) -> None:
    titles = ("", "printed", "predicted", "error", "target")
    columns = [render.Column(title=title, numeric=bool(title)) for title in titles]
    columns.append(render.Column(title="verdict"))
    if explain:
        columns.append(render.Column(title="why"))
    rows = []
    for line in lines:
        error = f"{line.error * 100:+.1f} points" if line.is_points else f"{line.error:+.1%}"
        target = "" if line.target is None else f"{line.target:.0%}".replace("%", " %")
        verdict = "fitted" if line.fitted else "missed" if not line.is_met else ""
        unit = f" {line.unit}" if line.unit else ""
        row = [line.what, f"{line.printed:.4g}{unit}", f"{line.predicted:.4g}{unit}", error]
        rows.append([*row, target, verdict or ("met" if target else "")])
        if explain:
            rows[-1].append(line.why)
    render.print_table(columns, rows)
    print()
    render.print_table(
        [
            render.Column(title="length fitted to"),
            render.Column(title="tokens", numeric=True),
            render.Column(title="worst TTFT", numeric=True),
            render.Column(title="worst ratio, points", numeric=True),
        ],
        [
            [row, f"{n:.0f}", f"{worst:.1%}", f"{ratio * 100:.1f}"]
            for row, n, worst, ratio in spread
        ],
    )
