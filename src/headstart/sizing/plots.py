"""The plots of a plan's page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headstart.figure import plain, svg
from headstart.sizing.answers import format_duration
from headstart.sizing.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOAD, COMPUTE = "#4a90d9", "#d98f4a"
COMPUTE_DASH = "6 2"
MEMORY = "#5aa37a"
MEMORY_DASH = "2 2"
_SIZE = (7.6, 3.3)
_MAX_FACTOR = 10.0
"""Of the colours: what is further apart looks the same."""


def times_svg(plan: Plan) -> str:
    """Seconds to compute a prompt, to load and to copy it alone, over its length."""
    alone = [cell for cell in plan.cells if cell.concurrency == 1]

    def draw(axes: Axes) -> None:
        axes.loglog(
            [tokens for tokens, _, _ in plan.curve],
            [seconds for _, seconds, _ in plan.curve],
            color=COMPUTE,
            linestyle=(0, (3, 1)),
        )
        lengths = [cell.tokens for cell in alone]
        axes.loglog(lengths, [cell.load_s for cell in alone], color=LOAD)
        axes.loglog(lengths, [cell.memory_s for cell in alone], color=MEMORY, linestyle=(0, (1, 1)))
        axes.set_ylabel("seconds to the first token")
        _tokens(axes)
        axes.yaxis.set_major_formatter(lambda value, _: format_duration(value))
        axes.yaxis.set_minor_formatter(lambda _value, _: "")

    title = "Seconds to the first token, computed, read and from memory, by prompt length"
    return svg("times", _SIZE, lambda figure: draw(figure.subplots()), title=title)


def break_even_svg(plan: Plan) -> str:
    """The bandwidth that one engine's loads must have, and the one there is for each."""
    share = plan.machine.read_bytes_per_s / plan.machine.num_engines / 1e9
    points = [(n, rate / 1e9) for n, _, rate in plan.curve if np.isfinite(rate)]

    def draw(axes: Axes) -> None:
        if points:
            axes.semilogx(*zip(*points, strict=True), color=COMPUTE, linestyle=(0, (3, 1)))
        axes.axhline(share, color=LOAD)
        axes.set_ylim(bottom=0.0)
        axes.set_ylabel("GB/s")
        _tokens(axes)

    title = "Break-even bandwidth of one engine, and what it has, by prompt length"
    return svg("break-even", _SIZE, lambda figure: draw(figure.subplots()), title=title)


def flips_svg(plan: Plan) -> str:
    """Load time over compute time of the last of so many prompts; a line where they are equal."""
    lengths = sorted({cell.tokens for cell in plan.cells})
    counts = sorted({cell.concurrency for cell in plan.cells})
    ratio = {(cell.tokens, cell.concurrency): cell.ratio for cell in plan.cells}
    grid = np.log10([[ratio[tokens, count] for tokens in lengths] for count in counts])

    def draw(figure: Figure) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        axes = figure.subplots()
        colors = LinearSegmentedColormap.from_list("flips", [LOAD, "#d7dbe0", COMPUTE])
        limit = np.log10(_MAX_FACTOR)
        drawn = axes.pcolormesh(
            lengths, counts, grid, cmap=colors, vmin=-limit, vmax=limit, shading="nearest"
        )
        if grid.min() < 0.0 < grid.max():
            axes.contour(lengths, counts, grid, levels=[0.0], colors=["#010203"])
        axes.set_xscale("log")
        axes.set_yscale("log", base=2)
        axes.set_ylabel("prompts at once, an engine")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _tokens(axes)
        bar = figure.colorbar(drawn, ax=axes, ticks=[-1, -0.5, 0, 0.5, 1])
        bar.ax.set_yticklabels(["0.1", "0.3", "1", "3", "10"])
        bar.set_label("load / compute")

    title = "Load over compute time, by prompt length and prompts at once"
    return svg("flips", _SIZE, draw, title=title)


def _tokens(axes: Axes) -> None:
    axes.set_xlabel("tokens of a prompt")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_formatter(lambda _value, _: "")
    plain(axes, grid="y")
