"""What was tuned, as rows of tables and as one page of HTML that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from headstart.figure import plain, svg
from headstart.page import html_keys, html_page, html_table
from headstart.traces.reading import Broken
from headstart.tuner.tune import ONLY_SIMULATED, Tuned
from headstart.units import format_nbytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (7.6, 3.6)
_COLORS = (
    *("#4a90d9", "#d98f4a", "#2f9e78", "#c75d9b", "#8a6fd1"),
    *("#b5a228", "#4fb3bf", "#a0522d", "#6b8e23", "#5b6470"),
)
_CURVE_POINTS = 400
_KNEE, _MOST = "#d9534f", "#7f8791"


def point_rows(tuned: Tuned) -> tuple[list[str], list[list[str]]]:
    """Titles, and a line for each point; as bytes only where a token's are known."""
    has_bytes = tuned.token_nbytes is not None
    titles = ["policy", "capacity, tokens", *["capacity"] * has_bytes]
    titles += ["blocks hit", "tokens hit", "tokens hit, last half"]
    rows = [
        [
            point.policy,
            f"{point.capacity_tokens:,}",
            *[_nbytes(tuned, point.capacity_tokens)] * has_bytes,
            f"{point.cold.block_hit:.2%}",
            f"{point.cold.token_hit:.2%}",
            f"{point.late.token_hit:.2%}",
        ]
        for point in tuned.points
    ]
    most = tuned.infinite
    last = [f"{share:.2%}" for share in (most.block_cold, most.tokens_cold, most.tokens_last_half)]
    return titles, [*rows, ["any", "no limit", *[""] * has_bytes, *last]]


def _nbytes(tuned: Tuned, tokens: int) -> str:
    return "" if tuned.token_nbytes is None else format_nbytes(tokens * tuned.token_nbytes)


def _capacity(tuned: Tuned, tokens: int) -> str:
    nbytes = _nbytes(tuned, tokens)
    return f"{tokens:,} tokens" + (f", {nbytes}" if nbytes else "")


def overview(tuned: Tuned, *, with_advice: bool = True) -> list[tuple[str, str]]:
    """What it comes to."""
    recorded, advice = tuned.recorded, tuned.advice
    enough = _capacity(tuned, _enough_tokens(tuned))
    rows = [
        ("requests", f"{len(recorded):,}"),
        ("prompt tokens", f"{int(recorded.input_tokens.sum()):,}"),
        (
            "all hits that are possible need",
            f"{enough}, under lru",
        ),
    ]
    if not with_advice:
        return rows
    if advice.capacity_tokens is None:
        rows.append(("recommended", "no cache for this load"))
    else:
        rows += [
            ("recommended capacity", f"{_capacity(tuned, advice.capacity_tokens)} (the knee)"),
            ("recommended policy", advice.policy),
            ("recommended block size", f"{advice.block_size:,} tokens"),
        ]
    rows += [("because", reason) for reason in advice.reasons]
    if recorded.share < 1.0:
        rows.append(("note", f"a sample of the sessions: {recorded.share:.2%} of the tokens"))
    if not recorded.has_times:
        rows.append(("note", "the trace tells no times; those of its sessions are made up"))
    if recorded.num_unchained:
        rows.append(("note", f"{recorded.num_unchained:,} ids follow others than at first"))
    return rows


def tune_html(tuned: Tuned, name: str, broken: Broken, times: Sequence[str] = ()) -> str:
    """The page. Raises ConfigError when matplotlib is not installed.

    `times`: parts of `headstart.tuner.timed_page`, if times were simulated, too.
    """
    title = f"How much cache is {name} worth?"
    titles, rows = point_rows(tuned)
    parts = [
        f"<h1>{escape(title)}</h1>",
        html_table(["", ""], overview(tuned, with_advice=not times), numbers=()),
        *times,
        "<h2>Hits by capacity</h2>",
        _keys(tuned),
        f"<figure>{curve_svg(tuned)}<figcaption>Share of the prompt tokens that are hits, in the "
        "last half of the requests. Lines: exact; points: simulated.</figcaption></figure>",
        html_table(titles, rows, numbers=range(1, len(titles))),
        "<h2>Block sizes</h2>",
        html_table(
            ["tokens a block", "tokens hit at the knee", "tokens hit, no limit"],
            [
                [
                    f"{each.block_size:,}",
                    f"{each.late.token_hit:.2%}",
                    f"{each.infinite.tokens_last_half:.2%}",
                ]
                for each in tuned.sizes
            ],
            numbers=range(3),
            caption="lru, last half of the requests.",
        ),
        '<p class="soft">Hits: one request at a time, all of a capacity in one tier; what requests '
        "in flight pin, and how long anything takes, is not simulated.</p>",
    ]
    if broken.count:
        first = "; ".join(broken.first)
        parts.append(f"<p>Not read: {broken.count:,}, such as {escape(first)}</p>")
    return html_page(title, parts)


def _enough_tokens(tuned: Tuned) -> int:
    return tuned.cold.enough_blocks * tuned.recorded.block_size


def _policies(tuned: Tuned) -> list[str]:
    named = dict.fromkeys(["lru", *(point.policy for point in tuned.points)])
    return list(named)[: len(_COLORS)]


def _label(name: str) -> str:
    return f"{name} (only simulated)" if name in ONLY_SIMULATED else name


def _keys(tuned: Tuned) -> str:
    looks = zip(_policies(tuned), _COLORS, strict=False)
    items = [(_label(name), color, "") for name, color in looks]
    items.append(("a cache without limit", _MOST, "6 2"))
    if tuned.advice.capacity_tokens is not None:
        items.append(("the knee", _KNEE, "2 2"))
    return html_keys(items)


def curve_svg(tuned: Tuned) -> str:
    """Token hits of the last half of the requests against capacity."""
    size = tuned.recorded.block_size

    def draw(axes: Axes) -> None:
        most = max(1, tuned.cold.enough_blocks)
        blocks = np.unique(np.geomspace(max(1, most // 1000), most, _CURVE_POINTS).astype(int))
        hits = [tuned.late.at(each).token_hit for each in blocks.tolist()]
        axes.plot(blocks * size, hits, color=_COLORS[0])
        for name, color in list(zip(_policies(tuned), _COLORS, strict=False))[1:]:
            points = [point for point in tuned.points if point.policy == name]
            axes.plot(
                [point.capacity_tokens for point in points],
                [point.late.token_hit for point in points],
                "o",
                color=color,
                markersize=4,
            )
        axes.axhline(tuned.infinite.tokens_last_half, color=_MOST, linestyle=(0, (3, 1)))
        if tuned.advice.capacity_tokens is not None:
            axes.axvline(tuned.advice.capacity_tokens, color=_KNEE, linestyle=(0, (1, 1)))
        axes.set_xscale("log")
        axes.set_ylim(bottom=0.0)
        axes.set_xlabel("capacity, tokens")
        axes.set_ylabel("tokens hit")
        axes.xaxis.set_major_formatter(lambda tokens, position: f"{tokens:,.0f}")
        axes.yaxis.set_major_formatter(lambda share, position: f"{share:.0%}")
        plain(axes, grid="y")

    title = "Share of prompt tokens hit against capacity, by policy, with the knee"
    return svg("curve", _SIZE, lambda figure: draw(figure.subplots()), title=title)
