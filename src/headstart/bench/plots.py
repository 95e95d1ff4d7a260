"""The plots of a report on runs. What is too much for a page is thinned out, never left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headstart.bench.groups import Group
from headstart.bench.intervals import Floats
from headstart.bench.summary import Summary, shown
from headstart.figure import plain, svg
from headstart.page import html_keys
from headstart.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_DRAWN = 8
"""Lines that can be told apart; the others are in the tables."""
MAX_POINTS = 3000
"""Of a plot."""
_CURVE_POINTS = 300
_NUM_BINS, _BIN_POINTS = 40, 15
"""Stretches of a line of medians, and points that each should have."""
_SIZE = (7.6, 3.3)
_NARROW, _WIDE = 3.0, 300.0
"""Largest by smallest value: below the one an axis is linear, beyond the other only decades fit."""
_COLORS = (
    *("#4a90d9", "#d98f4a", "#2f9e78", "#c75d9b"),
    *("#8a6fd1", "#a08c2c", "#d9534f", "#7f8791"),
)
_DASHES = ("", "6 2", "2 2", "6 2 2 2")
"""As SVG has them: colours alone are not for everybody."""
_TIERS = {"engine": "#c75d9b", "memory": "#4a90d9", "file": "#2f9e78"}
_CACHED, _COMPUTED = "cached", "computed"
_MAX_TIER = 32
MAX_BARS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How a line is drawn."""

    name: str
    color: str
    dash: str

    @property
    def line(self) -> object:
        """For matplotlib."""
        return (0, tuple(float(part) / 2 for part in self.dash.split())) if self.dash else "-"


def looks(names: Sequence[str]) -> list[Look]:
    """One a name, for as many as can be told apart."""
    return [
        Look(
            name=name,
            color=_COLORS[number % len(_COLORS)],
            dash=_DASHES[number % len(_DASHES)],
        )
        for number, name in enumerate(names[:MAX_DRAWN])
    ]


def keys(found: Sequence[Look]) -> str:
    """Which line is which, as HTML."""
    return html_keys((look.name, look.color, look.dash) for look in found)


def distribution_svg(groups: Sequence[Group]) -> str:
    """The share of the first tokens that had come by a time."""

    def draw(axes: Axes) -> None:
        for group, look in zip(groups, looks([g.name for g in groups]), strict=False):
            times = np.sort(_ttfts(group))
            ranks = np.unique(np.linspace(0, len(times) - 1, _CURVE_POINTS).astype(np.intp))
            axes.plot(times[ranks], (ranks + 1) / len(times), color=look.color, linestyle=look.line)
        axes.set_ylim(0.0, 1.0)
        axes.set_ylabel("share of the requests")
        axes.set_xlabel("time to the first token")
        _seconds(axes, "x")
        plain(axes, grid="y")

    title = "Share of the requests whose first token had come by a time, by arm"
    return svg("distribution", _SIZE, lambda figure: draw(figure.subplots()), title=title)


def over_time_svg(groups: Sequence[Group]) -> str:
    """Points: first tokens by when they should have been asked for; lines: their medians."""
    starts = phase_starts(groups)
    by_name = {look.name: look for look in timelines(groups)}
    drawn = [group for group in groups if group.timeline in by_name]

    def draw(axes: Axes) -> None:
        for group in drawn:
            at, times = _moments(group)
            if not len(at):
                continue
            some = np.arange(0, len(at), -(-len(at) * len(drawn) // MAX_POINTS))
            at, look = at + starts[group.phase], by_name[group.timeline]
            axes.plot(at[some], times[some], ".", color=look.color, markersize=3, alpha=0.35)
            axes.plot(*_medians(at, times), color=look.color, linestyle=look.line)
        for phase, start in starts.items():
            if phase:
                axes.axvline(start, alpha=0.25, linewidth=0.8, color="#7f8791")
                _label(axes, phase, (start, 1.0), ("data", "axes fraction"), (3, -9))
        axes.set_xlabel("seconds")
        axes.set_ylabel("time to the first token")
        _seconds(axes, "y")
        plain(axes, grid="y")

    title = "Time to the first token over the time of the run, by arm"
    return svg("over-time", _SIZE, lambda figure: draw(figure.subplots()), title=title)


def timelines(groups: Sequence[Group]) -> list[Look]:
    """The lines of the plot over time: an arm's phases are one."""
    return looks(list(dict.fromkeys(group.timeline for group in groups)))


def has_moments(groups: Sequence[Group]) -> bool:
    """Whether any run tells when its requests should have been sent."""
    return any(len(_moments(group)[0]) for group in groups)


def phase_starts(groups: Sequence[Group]) -> dict[str, float]:
    """Where each phase begins, in s, if each comes after the longest of those before."""
    lengths: dict[str, float] = {}
    for group in groups:
        longest = max(run.duration_s for run in group.runs)
        lengths[group.phase] = max(lengths.get(group.phase, 0.0), longest)
    starts, start = {}, 0.0
    for phase, length in lengths.items():
        starts[phase] = start
        start += length
    return starts


def curves_of(runs: Iterable[tuple[Group, Summary]]) -> dict[str, list[Summary]]:
    """Runs by arm, of the arms that were measured at several paces."""
    curves: dict[str, list[Summary]] = {}
    paces: dict[str, set[str]] = {}
    for group, summary in runs:
        curves.setdefault(group.curve, []).append(summary)
        paces.setdefault(group.curve, set()).add(group.pace)
    return {name: found for name, found in curves.items() if len(paces[name]) > 1}


def curve_svg(curves: dict[str, list[Summary]]) -> str:
    """Output tokens/s against the first token's p50 and p99, a point a run, a line an arm."""

    def draw(axes: Axes) -> None:
        for look, summaries in zip(looks(list(curves)), curves.values(), strict=False):
            ordered = sorted(summaries, key=lambda each: each.output_tokens_per_s)
            for quantile, marker in (("p50", "o"), ("p99", "^")):
                points = [
                    (each.output_tokens_per_s, found.value)
                    for each in ordered
                    if (found := each.times["ttft"].quantiles[quantile]) is not None
                ]
                if points:
                    axes.plot(
                        *zip(*points, strict=True),
                        marker=marker,
                        color=look.color,
                        linestyle=look.line,
                        markerfacecolor=look.color if quantile == "p50" else "none",
                    )
        axes.set_xlabel("output tokens/s")
        axes.set_ylabel("time to the first token")
        _seconds(axes, "y")
        plain(axes, grid="y")

    title = "Time to the first token against output tokens per second, a point a run"
    return svg("curve", _SIZE, lambda figure: draw(figure.subplots()), title=title)


def tier_shares(group: Group) -> dict[str, float]:
    """Shares of the prompt tokens by where their KV came from; empty: not told."""
    tokens: dict[str, int] = {}
    for run in group.runs:
        tiers = run.hit_tokens_by_tier
        asked = sum(request.prompt_tokens for request in run.good)
        known = [r.cached_tokens for r in run.good if r.cached_tokens is not None]
        if tiers is None and len(known) < len(run.good):
            return {}
        by_tier = sum((tiers or {}).values())
        cached = max(by_tier, sum(known))
        parts = {**(tiers or {}), _CACHED: cached - by_tier, _COMPUTED: max(0, asked - cached)}
        for name, count in parts.items():
            tokens[shown(name, _MAX_TIER)] = tokens.get(shown(name, _MAX_TIER), 0) + count
    computed = tokens.pop(_COMPUTED, 0)
    total = sum(tokens.values()) + computed
    return {
        name: count / total for name, count in (*tokens.items(), (_COMPUTED, computed)) if count
    }


def tiers_svg(groups: Sequence[Group]) -> str:
    """Stacked bars: where the KV of the prompt tokens came from, a bar an arm."""
    shares = [(group.name, found) for group in groups if (found := tier_shares(group))][:MAX_BARS]
    colors = tier_colors(groups)

    def draw(axes: Axes) -> None:
        rows = range(len(shares))
        left = np.zeros(len(shares))
        for tier, color in colors.items():
            widths = np.array([found.get(tier, 0.0) for _, found in shares])
            axes.barh(rows, widths, left=left, color=color, height=0.5)
            left += widths
        for row, (name, _) in enumerate(shares):
            _label(axes, name, (0.0, row - 0.3), "data", (0, 1))
        axes.set_yticks([])
        axes.set_ylim(len(shares) - 0.6, -0.9)
        axes.set_xlim(0.0, 1.0)
        axes.set_xlabel("share of the prompt tokens")
        plain(axes, grid="x")

    title = "Where the KV of the prompt tokens came from, by arm"
    height = 0.8 + 0.45 * len(shares)
    return svg("tiers", (7.6, height), lambda figure: draw(figure.subplots()), title=title)


def tier_colors(groups: Sequence[Group]) -> dict[str, str]:
    """Every tier that is told, the nearest first, and how it is drawn."""
    told = {name for group in groups for name in tier_shares(group)}
    others = sorted(told - {*_TIERS, _CACHED, _COMPUTED})
    colors = dict(zip(others, _COLORS[4:] * len(others), strict=False))
    colors = {**_TIERS, **colors, _CACHED: "#9cc4ec", _COMPUTED: "#b9bec6"}
    return {name: color for name, color in colors.items() if name in told}


def _ttfts(group: Group) -> Floats:
    return np.array([r.ttft_s for run in group.runs for r in run.good], dtype=np.float64)


def _moments(group: Group) -> tuple[Floats, Floats]:
    """When each request should have been sent, in order, and its time to the first token."""
    pairs = sorted(
        (r.intended_s, r.ttft_s)
        for run in group.runs
        for r in run.good
        if r.intended_s is not None and r.ttft_s is not None
    )
    found = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _medians(at: Floats, times: Floats) -> tuple[list[float], list[float]]:
    """Of stretches of equal length, those in which nothing was asked left out."""
    num_bins = int(np.clip(len(at) // _BIN_POINTS, 1, _NUM_BINS))
    edges = np.linspace(at[0], at[-1], num_bins + 1)
    bins = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, num_bins - 1)
    middles, medians = [], []
    for number in np.unique(bins):
        middles.append(float((edges[number] + edges[number + 1]) / 2))
        medians.append(float(np.median(times[bins == number])))
    return middles, medians


def _label(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    coordinates: str | tuple[str, str],
    points_off: tuple[int, int],
) -> None:
    """Text from a file, as it is: no formula, and however long it is, the plot stays."""
    label = axes.annotate(
        text, at, xycoords=coordinates, xytext=points_off, textcoords="offset points", fontsize=8
    )
    label.set_parse_math(False)
    label.set_in_layout(False)


def _seconds(axes: Axes, which: str) -> None:
    """An axis of durations with units, logarithmic where they differ much."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_data_interval()
    if high > _NARROW * low > 0.0:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        axis.set_major_locator(LogLocator(subs=(1.0,) if high > _WIDE * low else (1.0, 2.0, 5.0)))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
