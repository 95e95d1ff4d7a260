"""`headstart bench report`: runs side by side, and a page with plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart import render
from headstart.cli.options import JsonTarget, grouped
from headstart.errors import ConfigError

if TYPE_CHECKING:
    from headstart.bench.report import Report
    from headstart.bench.run import Run
    from headstart.bench.slo import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What runs are held against, and the page that is written of them."""

    slo: Annotated[
        str | None,
        typer.Option(
            help="What requests have to meet, such as ttft=2s,tpot=100ms,latency=30s, or a preset "
            "such as mlperf-llama3.1-8b-server, which is only MLPerf-style."
        ),
    ] = None
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with plots to FILE; needs matplotlib."),
    ] = None

    def checked(self) -> Slo:
        """The service level. Raises ConfigError, before long work, where either is wrong."""
        from headstart.bench.slo import parse_slo
        from headstart.figure import check_installed

        if self.html is not None:
            check_installed()
            render.check_target(str(self.html), option="--html")
        return parse_slo(self.slo)

    def write(self, runs: Sequence[Run], slo: Slo) -> None:
        """The page of a command's own runs, if one is asked for. Raises ConfigError."""
        from headstart.bench.report import make_report

        if self.html is None:
            return
        answered = [("run", run) for run in runs if run.good]
        if not answered:
            raise ConfigError("--html: no request was answered, so there is nothing to draw")
        self.write_page(make_report(answered, slo))

    def write_page(self, made: Report) -> None:
        """A page that is made already, if one is asked for. Raises ConfigError."""
        from headstart.bench.report import report_html

        if self.html is not None:
            render.write_text(self.html, report_html(made), option="--html")


@grouped
def report(
    shown: ReportOptions,
    files: Annotated[
        list[Path], typer.Argument(help="Runs, of any tool that `headstart gate` reads.")
    ],
    json: JsonTarget = None,
) -> None:
    """Show runs side by side: quantiles with intervals, throughput, hits, goodput; as a page, too.

    Runs are files that `headstart gate` reads, or what `headstart bench rate` wrote. They are
    grouped by arm and phase; a run without an arm has its file's name. To judge one arm against
    another, use `headstart gate`.
    """
    from headstart.bench.imports import read_runs
    from headstart.bench.report import make_report, report_document

    slo = shown.checked()
    made = make_report([(path.stem, run) for path in files for run in read_runs(path)], slo)
    shown.write_page(made)
    render.publish(report_document(made), json, lambda: _show(made))


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
