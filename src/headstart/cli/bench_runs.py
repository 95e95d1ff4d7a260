"""What `headstart bench serve` shows of its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from headstart import render

if TYPE_CHECKING:
    from headstart.bench.run import Run


def show_runs(runs: Sequence[Run], *, is_one: bool) -> None:
    """A line a figure of the only run, or a line an arm and phase of a campaign's."""
    if is_one:
        _show_one(runs[0])
    else:
        _show_medians(runs)


def _show_one(run: Run) -> None:
    good = run.good
    rows = [("requests", str(len(run.requests))), ("failed", str(len(run.requests) - len(good)))]
    if good:
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            tpot_s = run.tpot_s(share)
            rows.append((f"TTFT {name}, ms", f"{run.ttft_s(share) * 1000:.1f}"))
            if tpot_s is not None:
                rows.append((f"TPOT {name}, ms", f"{tpot_s * 1000:.1f}"))
        rows.append(("output, tokens/s", f"{run.output_tokens_per_s:.1f}"))
        hit_rate, lag_s = run.hit_rate, run.send_lag_s or 0.0
        rows.append(("hits, of the tokens", "not told" if hit_rate is None else f"{hit_rate:.1%}"))
        rows.append(("hits that are possible", f"{run.simulated_hit_rate or 0.0:.1%}"))
        rows.append(("sent late, p99, ms", f"{lag_s * 1000:.1f}"))
    first = next((r.error for r in run.requests if r.error), None)
    if first:
        rows.append(("first error", first))
    rows.append(("salt", run.salt))
    render.print_table([render.Column(title="bench serve"), render.Column(title="")], rows)


def _show_medians(runs: Sequence[Run]) -> None:
    by_kind: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        by_kind.setdefault((run.arm, run.phase), []).append(run)
    titles = ("runs", "failed", *_FIGURES)
    columns = [render.Column(title="arm"), render.Column(title="phase")]
    columns += [render.Column(title=title, numeric=True) for title in titles]
    rows = []
    for (arm, phase), those in sorted(by_kind.items(), key=lambda item: item[0][0]):
        failed = sum(len(run.requests) - len(run.good) for run in those)
        answered = [run for run in those if run.good]
        figures = [_figure(answered, value, form) for value, form in _FIGURES.values()]
        rows.append([arm or "-", phase or "-", str(len(those)), str(failed), *figures])
    render.print_table(columns, rows, title="bench serve: medians of the rounds")
    first = next((r.error for run in runs for r in run.requests if r.error), None)
    if first:
        print(f"first error: {first}")


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
