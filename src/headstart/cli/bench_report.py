"""`headstart bench report`: runs side by side, and a page with plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart import render
from headstart.cli.options import Html, JsonTarget, SloText
from headstart.errors import ConfigError

if TYPE_CHECKING:
    from headstart.bench.report import Report
    from headstart.bench.run import Run
    from headstart.bench.slo import Slo


def report(
    files: Annotated[
        list[Path], typer.Argument(help="Runs, of any tool that `headstart gate` reads.")
    ],
    slo: SloText = None,
    html: Html = None,
    json: JsonTarget = None,
) -> None:
    """Show runs side by side: quantiles with intervals, throughput, hits, goodput; as a page, too.

    Runs are JSON files of the schema headstart.bench.serve/1 or headstart.bench.rate/1, of `vllm
    bench serve --save-result --save-detailed` or of SGLang's bench_serving with --output-details.
    They are grouped by arm and phase; a run without an arm has its file's name. To judge one arm
    against another, use `headstart gate`.
    """
    from headstart.bench.imports import read_runs
    from headstart.bench.report import make_report, report_document
    from headstart.bench.slo import parse_slo

    level = parse_slo(slo)
    check_html(html)
    made = make_report([(path.stem, run) for path in files for run in read_runs(path)], level)
    write_html(made, html)
    render.publish(report_document(made), json, lambda: _show(made))


def check_html(html: Path | None) -> None:
    """Find out before long work whether a page can be made. Raises ConfigError."""
    if html is not None:
        from headstart.figure import check_installed

        check_installed()
        render.check_target(str(html), option="--html")


def write_html(made: Report, html: Path | None) -> None:
    """Write the page, if one is asked for. Raises ConfigError."""
    if html is not None:
        from headstart.bench.report import report_html

        render.write_text(html, report_html(made), option="--html")


def report_runs(runs: list[Run], slo: Slo, html: Path | None) -> None:
    """The page of a command's own runs. Raises ConfigError."""
    from headstart.bench.report import make_report

    if not any(run.good for run in runs):
        raise ConfigError("--html: no request was answered, so there is nothing to draw")
    write_html(make_report([("run", run) for run in runs if run.good], slo), html)


def _show(made: Report) -> None:
    from headstart.bench.report import not_measured, overview

    columns, rows = overview(made)
    titles = [
        render.Column(title=title, numeric=number > 0) for number, title in enumerate(columns)
    ]
    render.print_table(titles, rows, title="Runs; in brackets 95 % intervals of a run")
    if made.slo.limits:
        print(f"SLO: {made.slo}. {made.slo.note}".strip())
    for each in made.runs:
        if each.summary.is_sent_late:
            print(f"{each.name}: the client sent late, so its times are partly the client's")
        for kind, count in each.summary.errors.items():
            print(f"{each.name}: {count} requests failed with: {kind}")
    print(f"not measured, or not for every run: {'; '.join(not_measured(made))}")
