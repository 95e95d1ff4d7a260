"""The demo's plots, drawn without pyplot's global state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headstart.demo.results import Answer, DemoResult, Phase
from headstart.figure import plain, png, svg
from headstart.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

TITLES = {
    "recompute": "recompute, no cache",
    "cold": "cold store",
    "memory": "memory hit",
    "restart": "new process, from disk",
}
COLORS = {"recompute": "#8b929c", "cold": "#d98f4a", "memory": "#4a90d9", "restart": "#2f9e78"}
SOURCES = {
    "memory": ("loaded from memory", "#4a90d9"),
    "file": ("loaded from disk", "#2f9e78"),
    "computed": ("computed", "#b9bec6"),
}
STEPS = {"lookup_s": "look-up", "load_s": "load", "prefill_s": "prefill of the rest"}


def first_token_svg(result: DemoResult) -> str:
    """Bars: time to the first token of question 1, by phase."""
    return svg(
        "first-token",
        (7.2, 2.6),
        lambda figure: _first_token(figure.subplots(), result),
        title="Time to the first token of question 1, by phase",
    )


def questions_svg(result: DemoResult) -> str:
    """Dots on a logarithmic scale: time to the first token of every answer, by phase."""
    return svg(
        "questions",
        (7.2, 3.2),
        lambda figure: _questions(figure.subplots(), result),
        title="Time to the first token of every answer, by phase",
    )


def tokens_svg(result: DemoResult) -> str:
    """Stacked bars: where the tokens of every prompt came from, a panel a phase."""
    return svg(
        "tokens",
        (7.2, 3.4),
        lambda figure: _tokens(figure, result),
        title="Where the tokens of every prompt came from, by phase",
    )


def steps_svg(result: DemoResult) -> str:
    """Stacked bars: what the time to the first token of question 1 is made of, where it hit."""
    return svg(
        "steps",
        (7.2, 2.0),
        lambda figure: _steps(figure.subplots(), result),
        title="What the time to the first token of question 1 is made of",
    )


def write_plot(result: DemoResult, path: Path) -> None:
    """Write one PNG on white for a README: first token by phase, and tokens by source.

    Makes the folder of `path`. Raises ConfigError when matplotlib is not installed.
    """

    def draw(figure: Figure) -> None:
        upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 1.25)).flat
        _first_token(upper.subplots(), result)
        num_tokens = result.phases[0].first.prompt_tokens
        upper.suptitle(f"Time to the first token of a prompt of {num_tokens:,} tokens")
        _tokens(lower, result)
        lower.suptitle("Where the tokens of each prompt came from (six questions, then a chat)")

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png((8.0, 5.6), draw))


def _first_token(axes: Axes, result: DemoResult) -> None:
    phases = result.phases
    seconds = [phase.first.ttft_s for phase in phases]
    axes.barh(
        [TITLES[phase.name] for phase in phases],
        seconds,
        color=[COLORS[phase.name] for phase in phases],
        height=0.62,
    )
    for row, value in enumerate(seconds):
        faster = f", {seconds[0] / value:.0f} times faster" if value < seconds[0] / 2 else ""
        axes.annotate(
            format_seconds(value) + faster,
            (value, row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.invert_yaxis()
    axes.set_xlim(0, max(seconds) * 1.16)
    axes.set_xlabel("seconds")
    plain(axes, grid="x")


def _questions(axes: Axes, result: DemoResult) -> None:
    for phase in result.phases:
        axes.plot(
            _labels(phase.answers),
            [answer.ttft_s for answer in phase.answers],
            "o",
            color=COLORS[phase.name],
            markersize=7,
            label=TITLES[phase.name],
        )
    axes.set_yscale("log")
    axes.set_ylabel("seconds to first token")
    _legend(axes, columns=4)
    plain(axes, grid="y")


def _tokens(figure: Figure | SubFigure, result: DemoResult) -> None:
    panels = figure.subplots(1, len(result.phases), sharey=True)
    for axes, phase in zip(panels, result.phases, strict=True):
        bottom = [0] * len(phase.answers)
        for source, (label, color) in SOURCES.items():
            counts = [_count(answer, source) for answer in phase.answers]
            axes.bar(
                _labels(phase.answers), counts, bottom=bottom, color=color, width=0.8, label=label
            )
            bottom = [low + count for low, count in zip(bottom, counts, strict=True)]
        axes.set_title(TITLES[phase.name], fontsize=9)
        axes.tick_params(axis="x", labelsize=6.5)
        plain(axes, grid="y")
    panels[0].set_ylabel("tokens")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)


def _steps(axes: Axes, result: DemoResult) -> None:
    phases = [phase for phase in result.phases if phase.first.hit_tokens]
    left = [0.0] * len(phases)
    for (name, label), color in zip(STEPS.items(), ("#d98f4a", "#2f9e78", "#b9bec6"), strict=True):
        values = [getattr(phase.first, name) * 1e3 for phase in phases]
        axes.barh(_titles(phases), values, left=left, color=color, height=0.55, label=label)
        left = [low + value for low, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    _legend(axes, columns=3)
    plain(axes, grid="x")


def _titles(phases: list[Phase]) -> list[str]:
    return [TITLES[phase.name] for phase in phases]


def _labels(answers: tuple[Answer, ...]) -> list[str]:
    """Q1, Q2, ..., C1, C2, ... in the order of the answers."""
    numbers = {"question": 0, "chat": 0}
    labels = []
    for answer in answers:
        numbers[answer.kind] += 1
        labels.append(f"{answer.kind[0].upper()}{numbers[answer.kind]}")
    return labels


def _count(answer: Answer, source: str) -> int:
    if source == "computed":
        return answer.prompt_tokens - answer.hit_tokens
    return answer.tokens_from.get(source, 0)


def _legend(axes: Axes, *, columns: int) -> None:
    axes.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=columns,
        frameon=False,
        fontsize=9,
    )
