"""What `headstart plan` shows to people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headstart import render

if TYPE_CHECKING:
    from headstart.sizing.hardware import Drive, Gpu, Link, Network
    from headstart.sizing.plan import Plan
    from headstart.sizing.reference import Line


def show_plan(plan: Plan, *, explain: bool) -> None:
    """The answers, then times by length; with `explain` every formula and source."""
    columns = [render.Column(title=plan.model.name), render.Column(title="", numeric=True)]
    if explain:
        columns.append(render.Column(title="formula"))
    rows = [
        [each.title, each.shown, each.formula] if explain else [each.title, each.shown]
        for each in plan.answers
    ]
    render.print_table(columns, rows)
    print()
    _show_lengths(plan)
    if explain:
        print()
        render.print_table([render.Column(title="sources")], [[source] for source in plan.sources])


def _show_lengths(plan: Plan) -> None:
    from headstart.sizing.answers import format_duration

    titles = ("tokens", "computed", "read, alone", "from memory", "loading wins up to")
    alone = {cell.tokens: cell for cell in plan.cells if cell.concurrency == 1}
    rows = []
    for tokens, count in plan.flips:
        cell = alone[tokens]
        times = (cell.recompute_s, cell.load_s, cell.memory_s)
        rows.append([f"{tokens:,}", *map(format_duration, times), f"{count:,} at once"])
    render.print_table([render.Column(title=title, numeric=True) for title in titles], rows)


def show_reference(
    lines: Sequence[Line], spread: Sequence[tuple[str, float, float, float]], *, explain: bool
) -> None:
    """Printed beside predicted, then what fitting to another row would give."""
    titles = ("", "printed", "predicted", "error", "target")
    columns = [render.Column(title=title, numeric=bool(title)) for title in titles]
    columns.append(render.Column(title="verdict"))
    if explain:
        columns.append(render.Column(title="why"))
    rows = []
    for line in lines:
        target = "" if line.target is None else f"{line.target:.0%}".replace("%", " %")
        unit = f" {line.unit}" if line.unit else ""
        row = [line.what, f"{line.printed:.4g}{unit}", f"{line.predicted:.4g}{unit}", _error(line)]
        rows.append([*row, target, line.verdict.value])
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


def _error(line: Line) -> str:
    """Of a ratio, with its range over the bandwidths that are stated."""
    if not line.is_points:
        return f"{line.error:+.1%}"
    low, high = (f"{each * 100:+.1f}" for each in line.errors)
    return f"{line.error * 100:+.1f} ({low} to {high}) points"


def preset_rows() -> list[list[str]]:
    """Kind, name, figures and source of all that a plan knows by name."""
    from headstart.sizing.configfile import known_models, read_model
    from headstart.sizing.hardware import presets

    found = presets()
    rows = []
    for name in known_models():
        model = read_model(name)
        kib = float(model.token_nbytes(model.dtype)) / 1024
        figures = f"{model.active_parameters:.4g} parameters a token, {kib:.4g} KiB of KV"
        rows.append(["model", name, figures, model.source])
    rows += [["gpu", name, _gpu(part), part.source] for name, part in found.gpus.items()]
    rows += [["link", name, _link(part), part.source] for name, part in found.links.items()]
    rows += [["drive", name, _drive(part), part.source] for name, part in found.drives.items()]
    rows += [["network", name, _link(part), part.source] for name, part in found.networks.items()]
    raid0 = f"x {found.raid0.efficiency:g}"
    return [*rows, ["RAID0", "", raid0, found.raid0.source], ["MFU", "", "", found.mfu.source]]


def _gpu(gpu: Gpu) -> str:
    peaks = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in gpu.flops.items())
    return f"{peaks} TFLOPS, MFU {gpu.mfu:g}, {gpu.link}"


def _link(link: Link | Network) -> str:
    return f"{link.bytes_per_s / 1e9:.4g} GB/s x {link.efficiency:g}"


def _drive(drive: Drive) -> str:
    read, write = drive.read_bytes_per_s / 1e9, drive.write_bytes_per_s / 1e9
    return f"{read:.4g} GB/s read, {write:.4g} written, {drive.latency_s * 1e6:.4g} us"
