"""`headstart doctor`: why is the first token slow although the cache hits?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart import render
from headstart.cli.options import JsonTarget
from headstart.errors import ConfigError
from headstart.units import format_seconds

if TYPE_CHECKING:
    from headstart.doctor.findings import Diagnosis, Finding

EXIT_FINDING = 1
EXIT_NOTHING = 2
_EXITS = {"no_fault": 0, "cannot_say": EXIT_NOTHING}


def doctor(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="What you have; several files add up."),
    ] = None,
    json: JsonTarget = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with the split to FILE; needs matplotlib."),
    ] = None,
    watch: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Follow a server's metrics, such as http://HOST:8000/metrics, until Ctrl-C.",
        ),
    ] = None,
    every: Annotated[
        str, typer.Option(metavar="TIME", help="Time between two looks of --watch.")
    ] = "10s",
) -> None:
    r"""Say what makes the first token slow although the cache hits, how sure that is, and the fix.

    Works on figures of any engine; nothing of Headstart has to run. The least is a TOML file with
    what you measured, without the cache and with hits:

    \b
        engine = "vllm"
        prompt_tokens = 64000
        [[arms]]
        name = "computed"
        cache = "off"              # off, cold, warm or on
        ttft_p50 = "12 s"
        [[arms]]
        name = "hit"
        cache = "warm"
        ttft_p50 = "17 s"
        [[tiers]]
        name = "share"
        bandwidth = "0.5 GB/s"

    The more stages, counters and monitor readings it has, the surer the answer; what would help is
    listed last. All keys are in docs/doctor-observations.md; a misspelt one is refused. Results of
    load generators, vLLM's /metrics (two snapshots) and Headstart's decision log are read as well.

    With --watch, files tell what metrics do not, such as a run without the cache.

    Exit code 0 no fault (or --watch was ended), 1 causes found, 2 nothing usable: it cannot say, or
    a file is wrong.
    """
    if watch is not None:
        _watch(watch, every, files or [], json, html)
        return
    if not files:
        raise typer.BadParameter("give files, or --watch URL", param_hint="FILE...")
    _examine(files, json, html)


def _examine(files: list[Path], json: str | None, html: Path | None) -> None:
    from headstart.doctor.diagnose import diagnose
    from headstart.doctor.facts import Known
    from headstart.doctor.readers import READERS, load
    from headstart.doctor.report import document

    if html is not None:
        from headstart.figure import check_installed

        check_installed()
        render.check_target(str(html), option="--html")
    report = load(files, READERS)
    diagnosis = diagnose(Known(report.facts), skipped=report.skipped)
    if html is not None:
        from headstart.doctor.html_report import diagnosis_html

        render.write_text(html, diagnosis_html(diagnosis), option="--html")
    render.publish(document(diagnosis), json, lambda: _show(diagnosis))
    raise typer.Exit(_EXITS.get(diagnosis.verdict, EXIT_FINDING))


def _watch(url: str, every: str, files: list[Path], json: str | None, html: Path | None) -> None:
    """Follow a server. `json` has what is known after the last look."""
    from headstart.cli.doctor_watch import watch
    from headstart.doctor.readers import READERS, load
    from headstart.doctor.report import document

    if html is not None:
        raise ConfigError("--html is a page of files; save /metrics to files, and give those")
    if json == "-":
        raise ConfigError("--watch has a screen of its own: write --json FILE, its latest state")
    render.check_target(json)
    told = load(files, READERS)
    watch(
        url,
        every,
        told.facts,
        told.skipped,
        on_view=lambda view: render.save(document(view.diagnosis), json),
    )


def _show(diagnosis: Diagnosis) -> None:
    columns = [render.Column(title="doctor"), render.Column(title="")]
    rows = [("verdict", str(diagnosis.verdict).replace("_", " "))]
    rows += [("healthy", str(each)) for each in diagnosis.healthy]
    render.print_table(columns, [*rows, *_splits(diagnosis)])
    for number, finding in enumerate(diagnosis.findings, start=1):
        print()
        render.print_table(
            [render.Column(title=f"finding {number}"), render.Column(title="")],
            list(_rows(finding)),
        )
    last = [("measure", each) for each in diagnosis.missing]
    last += [("not used", each) for each in diagnosis.notes]
    if last:
        print()
        render.print_table([render.Column(title="to be surer"), render.Column(title="")], last)


def _rows(finding: Finding) -> Iterator[tuple[str, str]]:
    yield "cause", str(finding.cause).replace("_", " ")
    yield "confidence", f"{finding.confidence:.0%}"
    if finding.explained_s is not None:
        yield "explains", format_seconds(finding.explained_s)
    for evidence in finding.evidence:
        yield "evidence", str(evidence)
    for fix in finding.fixes:
        yield "fix", fix


def _splits(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    from headstart.doctor.quantities import show_signed_seconds as signed

    for split in diagnosis.splits:
        parts = ", ".join(
            f"{stage.name} {signed(stage.seconds)}" + ("" if stage.is_measured else " (computed)")
            for stage in split.stages
        )
        where = f" of {split.arm}" if split.arm else ""
        yield "first token" + where, f"{format_seconds(split.ttft_s)}: {parts}"
