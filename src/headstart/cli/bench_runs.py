"""What `headstart bench serve` shows of its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from headstart import render

if TYPE_CHECKING:
    from headstart.bench.run import Run
    from headstart.bench.slo import Slo


def show_runs(runs: Sequence[Run], slo: Slo, *, is_one: bool) -> None:
    """A line a figure of the only run, or a line an arm and phase of a campaign's."""
    if is_one:
        _show_one(runs[0], slo)
    else:
        _show_medians(runs, slo)


def _show_one(run: Run, slo: Slo) -> None:
    from headstart.bench.summary import figures, summarise

    rows = list(figures(summarise(run, slo)))
    first = next((r.error for r in run.requests if r.error), None)
    if first:
        rows.append(("first error", first))
    if slo.note:
        rows.append(("note", slo.note))
    rows.append(("salt", run.salt))
    render.print_table([render.Column(title="bench serve"), render.Column(title="")], rows)


def _show_medians(runs: Sequence[Run], slo: Slo) -> None:
    from headstart.bench.ratios import good_share

    told = dict(_FIGURES)
    if slo.limits:
        told[f"meet {slo}"] = (lambda run: good_share(run, slo.is_met), ".1%")
    by_kind: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        by_kind.setdefault((run.arm, run.phase), []).append(run)
    titles = ("runs", "failed", *told)
    columns = [render.Column(title="arm"), render.Column(title="phase")]
    columns += [render.Column(title=title, numeric=True) for title in titles]
    rows = []
    for (arm, phase), those in sorted(by_kind.items(), key=lambda item: item[0][0]):
        failed = sum(len(run.requests) - len(run.good) for run in those)
        answered = [run for run in those if run.good]
        figures = [_figure(answered, value, form) for value, form in told.values()]
        rows.append([arm or "-", phase or "-", str(len(those)), str(failed), *figures])
    render.print_table(columns, rows, title="bench serve: medians of the rounds")
    first = next((r.error for run in runs for r in run.requests if r.error), None)
    if first:
        print(f"first error: {render.printable(first)}")


_Value = Callable[["Run"], float | None]
_FIGURES: dict[str, tuple[_Value, str]] = {
    "TTFT p50 ms": (lambda run: run.ttft_s(0.5) * 1000, ".1f"),
    "p99 ms": (lambda run: run.ttft_s(0.99) * 1000, ".1f"),
    "tokens/s": (lambda run: run.output_tokens_per_s, ".1f"),
    "hits": (lambda run: run.hit_rate, ".1%"),
    "possible": (lambda run: run.simulated_hit_rate, ".1%"),
    "CPU s": (lambda run: run.cpu_s, ".1f"),
    "hits back s": (lambda run: run.rebuild.hit_rate_s if run.rebuild else None, ".2f"),
    "TTFT back s": (lambda run: run.rebuild.ttft_s if run.rebuild else None, ".2f"),
}


def _figure(runs: Sequence[Run], value: _Value, form: str) -> str:
    """The median of what runs tell; "-" where one of them does not."""
    values = [value(run) for run in runs]
    told = [each for each in values if each is not None]
    return f"{median(told):{form}}" if told and len(told) == len(values) else "-"
