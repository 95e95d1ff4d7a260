"""Figures of reports, drawn without pyplot's global state: SVG for a page, PNG for a README."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from headstart.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Draw = Callable[["Figure"], None]
_INK = "#010203"
"""Stands for the colour of the page's text, which is not known when a plot is drawn."""


def check_installed() -> None:
    """Find out now whether anything can be drawn. Raises ConfigError."""
    if find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib; get it with: pip install 'headstart[report]'")


def svg(name: str, size: tuple[float, float], draw: Draw, *, title: str) -> str:
    """A plot as an SVG element that takes the page's text colour and refers to nothing outside.

    `name` keeps its ids apart from those of other plots on the page; `title` is what readers
    who do not see it are told. Raises ConfigError when matplotlib is not installed.
    """
    options = {"format": "svg", "transparent": True, "metadata": {"Date": None}}
    text = _render(size, draw, ink=_INK, options=options, name=name).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head, text = text[: text.index(">")], text[text.index(">") + 1 :]
    view = re.search(r'viewBox="[^"]*"', head)
    assert view is not None
    text = f'<svg {view[0]} role="img" aria-label="{escape(title)}">{text}'
    return text.replace("xlink:href", "href").replace(_INK, "currentColor")


def png(size: tuple[float, float], draw: Draw) -> bytes:
    """A picture on white. Raises ConfigError when matplotlib is not installed."""
    options = {"format": "png", "dpi": 144, "facecolor": "white", "metadata": {"Software": None}}
    return _render(size, draw, ink="#24292f", options=options)


def plain(axes: Axes, *, grid: str) -> None:
    """Take away what carries no data; `grid` is the axis whose values are read."""
    for side in ("top", "right", "left" if grid == "y" else "bottom"):
        axes.spines[side].set_visible(False)
    for spine in axes.spines.values():
        spine.set_alpha(0.5)
    axes.tick_params(length=0)
    axes.grid(axis="x" if grid == "x" else "y", alpha=0.15)
    axes.set_axisbelow(True)


def _render(
    size: tuple[float, float],
    draw: Draw,
    *,
    ink: str,
    options: dict[str, Any],
    name: str = "",
) -> bytes:
    """Draw a figure with text and lines in the colour `ink`, and save it."""
    check_installed()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    colored = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    # The salt keeps the ids of several plots on one page apart, and the same in every run.
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name, "grid.color": ink}
    with mpl.rc_context(settings | dict.fromkeys(colored, ink)), warnings.catch_warnings():
        # Text is set by the reader's browser: what this machine's fonts lack does not matter.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, **options)
    return buffer.getvalue()
