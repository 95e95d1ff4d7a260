"""What `headstart doctor --html` writes: verdict, findings, and where each first token's time goes.

Everything told comes from files of others, so all of it is text here and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from headstart.doctor.findings import Cause, Diagnosis, Finding, Split
from headstart.doctor.quantities import show_signed_seconds
from headstart.figure import plain, svg
from headstart.page import html_keys, html_page, html_table
from headstart.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {
    "queue": "#d98f4a",
    "look-up": "#c75d9b",
    "load": "#4a90d9",
    "ready, not run": "#a08c2c",
    "prefill": "#2f9e78",
    "rest": "#b9bec6",
}
"""A stage of the split each, in the order in which they come."""
_PALE = 0.45
_MAX_BARS = 24
_LONGEST = 90


def diagnosis_html(diagnosis: Diagnosis) -> str:
    """The whole page. Raises ConfigError when matplotlib is not installed."""
    parts = (
        *_headline(diagnosis),
        *_first_token(diagnosis.splits),
        *_findings(diagnosis.findings),
        *_list("To be surer, measure", diagnosis.missing),
        *_list("Not used, or not accounted for", diagnosis.notes),
        "<h2>How to read this</h2>",
        "<p>A finding explains the seconds of the first token that would go with its cause; its "
        "confidence is a degree of belief, no frequency. Evidence ends with the file and line "
        "that each figure is from. Causes come in the order of what they explain times how sure "
        "they are; figures that cannot be right and wrong answers come before all others.</p>",
    )
    # A path may have bytes that are no UTF-8, which cannot be written as they are.
    return html_page("Headstart doctor", parts).encode("utf-8", "replace").decode("utf-8")


def _headline(diagnosis: Diagnosis) -> Iterator[str]:
    kind = {Cause.NO_FAULT: "good", Cause.CANNOT_SAY: "soft"}.get(diagnosis.verdict, "bad")
    yield "<h1>Headstart doctor</h1>"
    yield f'<p>Verdict: <span class="{kind}">{_words(diagnosis.verdict)}</span></p>'
    for each in diagnosis.healthy:
        yield f"<p>As it should be: {escape(str(each))}</p>"


def _first_token(splits: Sequence[Split]) -> Iterator[str]:
    if not splits:
        return
    yield "<h2>Where the time to the first token goes</h2>"
    names = [name for name in _COLORS if any(_seconds(each, name) for each in splits)]
    more = len(splits) - _MAX_BARS
    yield (
        f"<figure>{html_keys((name, _COLORS[name], '') for name in names)}"
        f"{_waterfall(splits[:_MAX_BARS])}<figcaption>Stages one after the other; pale ones are "
        "computed, from sizes and rates or as what is left. The line is the time to the first "
        "token: stages that go past it overlap, or are not of the same requests."
        f"{f' {more} more are only in the table.' if more > 0 else ''}</figcaption></figure>"
    )
    rows = [
        [each.arm or "all", format_seconds(each.ttft_s), *(_cell(each, name) for name in _COLORS)]
        for each in splits
    ]
    titles = ["arm", "first token", *_COLORS]
    yield html_table(
        titles, rows, numbers=range(1, len(titles)), caption="Computed stages have a ~."
    )


def _waterfall(splits: Sequence[Split]) -> str:
    """A bar an arm, in which a stage begins where the one before it ends."""

    def draw(axes: Axes) -> None:
        for row, split in enumerate(splits):
            left = 0.0
            for stage in split.stages:
                if stage.seconds <= 0.0:
                    continue  # a rest below zero: the stages go past the line
                axes.barh(
                    row,
                    stage.seconds,
                    left=left,
                    height=0.5,
                    color=_COLORS[stage.name],
                    alpha=1.0 if stage.is_measured else _PALE,
                )
                left += stage.seconds
            axes.plot([split.ttft_s] * 2, [row - 0.32, row + 0.32], color="#7f8791", linewidth=2)
            label = axes.annotate(
                _label(split.arm),
                (0.0, row - 0.3),
                xytext=(0, 1),
                textcoords="offset points",
                fontsize=8,
            )
            label.set_parse_math(False)  # a name is no formula
            label.set_in_layout(False)
        axes.set_yticks([])
        axes.set_ylim(len(splits) - 0.6, -0.9)
        axes.set_xlim(left=0.0)
        axes.set_xlabel("time since the request came")
        axes.xaxis.set_major_formatter(lambda value, _: format_seconds(value))
        plain(axes, grid="x")

    title = "Stages of the time to the first token, a bar an arm"
    size = (7.6, 0.9 + 0.5 * len(splits))
    return svg("waterfall", size, lambda figure: draw(figure.subplots()), title=title)


def _label(name: str) -> str:
    """A name as fonts can draw it, and not wider than the picture."""
    shown = "".join(each if each.isprintable() else "?" for each in name) or "all"
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    for number, each in enumerate(findings, start=1):
        yield f"<h2>{number}. {_words(each.cause)}</h2>"
        explains = "" if each.explained_s is None else format_seconds(each.explained_s)
        yield (
            f"<p>{each.confidence:.0%} sure"
            f"{f', explains {explains} of the first token' if explains else ''}; rule "
            f"<code>{escape(each.rule)}</code>.</p>"
        )
        yield _items(str(evidence) for evidence in each.evidence)
        if each.fixes:
            yield f"<p>What to change:</p>{_items(each.fixes)}"


def _list(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"<h2>{escape(title)}</h2>{_items(lines)}"


def _items(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _words(cause: Cause) -> str:
    return str(cause).replace("_", " ")


def _seconds(split: Split, name: str) -> float | None:
    return next((stage.seconds for stage in split.stages if stage.name == name), None)


def _cell(split: Split, name: str) -> str:
    for stage in split.stages:
        if stage.name == name:
            return ("" if stage.is_measured else "~ ") + show_signed_seconds(stage.seconds)
    return "-"
