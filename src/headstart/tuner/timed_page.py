"""The part of a tuning's page that is about time and money."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from headstart.figure import plain, svg
from headstart.page import html_keys, html_table
from headstart.sizing.answers import format_duration
from headstart.tuner.case import Timed
from headstart.tuner.latency import COMPUTED, ENGINE, Loads
from headstart.tuner.recipe import engine_flags, settings_toml
from headstart.tuner.timed import Times, overview, point_rows
from headstart.units import format_nbytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_SIZE = (7.6, 3.4)
_COLORS = ("#4a90d9", "#d98f4a", "#2f9e78", "#c75d9b", "#8a6fd1")
_KNEE, _WITHOUT = "#d9534f", "#7f8791"
_P50, _P99 = _COLORS[0], _COLORS[1]
_SOURCES = {ENGINE: "#8a6fd1", "memory": "#2f9e78", "file": "#4a90d9", COMPUTED: "#b9c0c8"}
_MAX_BARS = 20
_THERE = "<figcaption>At the recommended capacities.</figcaption>"
_GIB = float(1 << 30)
_DASHES = (0, (3, 1))


def parts(times: Times) -> list[str]:
    """HTML. Raises ConfigError when matplotlib is not installed."""
    titles, rows = point_rows(times, times.front)
    found = [
        "<h2>Time and money</h2>",
        html_table(["", ""], overview(times), numbers=()),
        html_table(
            titles,
            rows,
            numbers=[0, 1, 2, *range(5, len(titles) - 1)],
            caption="What nothing beats, by price; last half of the requests.",
        ),
        "<h2>First token by capacity</h2>",
        html_keys(_capacity_keys(times)),
        f"<figure>{capacity_svg(times)}<figcaption>Time to the first token against memory and file "
        "tier together: p50 as lines, p99 dashed.</figcaption></figure>",
        "<h2>Where tokens come from</h2>",
        html_keys([(name, color, "") for name, color in _sources(times).items()]),
        f"<figure>{shares_svg(times)}<figcaption>Share of the prompt tokens, for each line of the "
        "table.</figcaption></figure>",
    ]
    if times.best is None:
        return found
    if len(times.near("block_size")) > 1:
        found += [
            "<h2>First token by block size</h2>",
            html_keys([("p50", _P50, ""), ("p99", _P99, "6 2")]),
            f"<figure>{blocks_svg(times)}{_THERE}</figure>",
        ]
    if len(times.near("policy", "loads")) > 1:
        found += [
            "<h2>First token by policy</h2>",
            html_keys([("p50", _P50, ""), ("p99", _P99, "")]),
            f"<figure>{policies_svg(times)}{_THERE}</figure>",
        ]
    return found + _settings(times, times.best)


def _settings(times: Times, best: Timed) -> list[str]:
    site = times.case.site
    flags = engine_flags(site, best).items()
    return [
        "<h2>Settings</h2>",
        f"<pre>{escape(settings_toml(site, best))}</pre>",
        html_table(["engine", "started with"], [[name, text] for name, text in flags], numbers=()),
        "<p class=soft>Sources: " + escape("; ".join(site.machine.sources)) + "</p>",
    ]


def _lines(times: Times) -> dict[int, list[Timed]]:
    """For each memory, what was tried in the trace's blocks, with `lru` and the planner."""
    found: dict[int, list[Timed]] = {}
    for each in times.tried:
        way = each.setting.block_size, each.setting.policy, each.setting.loads
        if each.setting.memory_nbytes and way == (
            times.without.setting.block_size,
            "lru",
            Loads.PLANNED,
        ):
            found.setdefault(each.setting.memory_nbytes, []).append(each)
    return dict(sorted(found.items())[: len(_COLORS)])


def _capacity_keys(times: Times) -> list[tuple[str, str, str]]:
    keys = [
        (f"{format_nbytes(memory)} of memory", color, "")
        for memory, color in zip(_lines(times), _COLORS, strict=False)
    ]
    keys.append(("no cache", _WITHOUT, ""))
    return keys + [("recommended", _KNEE, "2 2")] * (times.best is not None)


def _total(timed: Timed) -> float:
    return (timed.setting.memory_nbytes + timed.setting.file_nbytes) / _GIB


def capacity_svg(times: Times) -> str:
    """Time to the first token against capacity, with the knee."""

    def draw(axes: Axes) -> None:
        for points, color in zip(_lines(times).values(), _COLORS, strict=False):
            ranked = sorted(points, key=_total)
            totals = [_total(each) for each in ranked]
            p50 = [each.latency.p50_s for each in ranked]
            p99 = [each.latency.p99_s for each in ranked]
            axes.plot(totals, p50, "o-", color=color, markersize=3)
            axes.plot(totals, p99, "o", color=color, markersize=3, linestyle=_DASHES)
        axes.axhline(times.without.latency.p50_s, color=_WITHOUT)
        axes.axhline(times.without.latency.p99_s, color=_WITHOUT, linestyle=_DASHES)
        if times.best is not None:
            axes.axvline(_total(times.best), color=_KNEE, linestyle=(0, (1, 1)))
        if _lines(times):
            axes.set_xscale("log")
            _marks(axes.xaxis)
        axes.set_xlabel("memory and drives, GiB")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.xaxis.set_minor_formatter(lambda _value, _: "")
        axes.set_yscale("log")
        _marks(axes.yaxis)
        _seconds(axes)
        plain(axes, grid="y")

    title = "Time to the first token against capacity, with the knee"
    return svg("ttft", _SIZE, lambda figure: draw(figure.subplots()), title=title)


def blocks_svg(times: Times) -> str:
    """Time to the first token against the size of blocks."""
    points = sorted(times.near("block_size"), key=lambda each: each.setting.block_size)
    sizes = [each.setting.block_size for each in points]

    def draw(axes: Axes) -> None:
        axes.plot(sizes, [each.latency.p50_s for each in points], "o-", color=_P50)
        p99 = [each.latency.p99_s for each in points]
        axes.plot(sizes, p99, "o", color=_P99, linestyle=_DASHES)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, labels=[f"{size:,}" for size in sizes])
        axes.set_ylim(bottom=0.0)
        axes.set_xlabel("tokens a block")
        _seconds(axes)
        plain(axes, grid="y")

    title = "Time to the first token by block size"
    return svg("blocks", _SIZE, lambda figure: draw(figure.subplots()), title=title)


def policies_svg(times: Times) -> str:
    """Time to the first token by policy, with the planner and without."""
    points = sorted(times.near("policy", "loads"), key=_way)
    labels = [f"{each.setting.policy}, {each.setting.loads}" for each in points]

    def draw(axes: Axes) -> None:
        for offset, color, values in (
            (-0.2, _P50, [each.latency.p50_s for each in points]),
            (0.2, _P99, [each.latency.p99_s for each in points]),
        ):
            places = [row + offset for row in range(len(points))]
            bars = axes.barh(places, values, height=0.36, color=color)
            axes.bar_label(bars, labels=[f" {format_duration(each)}" for each in values])
        axes.set_yticks(range(len(points)), labels=labels)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel("seconds to the first token")
        plain(axes, grid="x")

    size = (_SIZE[0], 1.0 + 0.6 * len(points))
    title = "Time to the first token by policy"
    return svg("policies", size, lambda figure: draw(figure.subplots()), title=title)


def _way(timed: Timed) -> tuple[bool, str]:
    """With the planner first."""
    return timed.setting.loads is not Loads.PLANNED, timed.setting.policy


def _sources(times: Times) -> dict[str, str]:
    """Those that any token comes from, with their colours."""
    names = {name for each in times.front for name, share in each.latency.shares.items() if share}
    return {name: color for name, color in _SOURCES.items() if name in names}


def shares_svg(times: Times) -> str:
    """Where tokens come from, for settings that nothing beats."""
    points = times.front[:: -(-len(times.front) // _MAX_BARS)]
    labels = [
        " + ".join(format_nbytes(nbytes) for nbytes in each.setting.capacities) or "no cache"
        for each in points
    ]

    def draw(axes: Axes) -> None:
        starts = [0.0] * len(points)
        for name, color in _sources(times).items():
            shares = [each.latency.shares.get(name, 0.0) for each in points]
            axes.barh(range(len(points)), shares, left=starts, color=color, height=0.7)
            starts = [start + share for start, share in zip(starts, shares, strict=True)]
        axes.set_yticks(range(len(points)), labels=labels)
        axes.invert_yaxis()
        axes.set_xlim(0.0, 1.0)
        axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.set_xlabel("prompt tokens")
        plain(axes, grid="x")

    size = (_SIZE[0], 1.0 + 0.3 * len(points))
    title = "Share of the prompt tokens by where they come from, by capacity"
    return svg("shares", size, lambda figure: draw(figure.subplots()), title=title)


def _marks(axis: Axis) -> None:
    """Of a logarithmic axis that may span less than a decade."""
    from matplotlib.ticker import LogLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))


def _seconds(axes: Axes) -> None:
    axes.set_ylabel("seconds to the first token")
    axes.yaxis.set_major_formatter(lambda value, _: format_duration(value))
    axes.yaxis.set_minor_formatter(lambda _value, _: "")
