"""`headstart doctor --watch`: a screen that follows the metrics of a running server."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headstart.errors import ConfigError
from headstart.units import format_seconds, parse_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headstart.doctor.facts import Fact
    from headstart.doctor.watch import Moving, View

_LEAST_S, _MOST_S = 0.1, 3600.0
_TIMEOUT_S = 10.0
_BARS = "▁▂▃▄▅▆▇█"
_MAX_EVIDENCE, _MAX_FIXES = 3, 2
Show = Callable[["View | None", str], None]
"""Called with what is known, and with what is wrong now (empty: nothing)."""


def watch(
    url: str,
    every: str,
    known: Sequence[Fact],
    skipped: Sequence[str],
    *,
    sleep: Callable[[float], None] = time.sleep,
    on_view: Callable[[View], None] = lambda view: None,
) -> None:
    """Scrape `url`, show what it says, and again, until Ctrl-C.

    `known` and `skipped` are what files told; `on_view` gets each view before it is shown. The
    first scrape has to succeed; later a server that is away is waited for. Raises ConfigError.
    """
    from headstart.doctor.readers import Document
    from headstart.doctor.scrape import check_url, fetch
    from headstart.doctor.watch import Watch

    check_url(url)
    every_s = parse_seconds(every)
    if not _LEAST_S <= every_s <= _MOST_S:
        raise ConfigError(f"--every {every}: from {_LEAST_S:g}s to 1h; 10s is good for a server")
    seen = Watch(known, skipped=skipped)
    view: View | None = None
    try:
        view = seen.add(Document(path=url, text=fetch(url, timeout_s=_TIMEOUT_S)))
        with _screen(url, every_s) as show:
            wrong = ""
            while True:
                if not wrong:
                    on_view(view)
                show(view, wrong)
                sleep(every_s)
                try:
                    text = fetch(url, timeout_s=_TIMEOUT_S)
                    view, wrong = seen.add(Document(path=url, text=text)), ""
                except ConfigError as error:
                    wrong = str(error)
    except KeyboardInterrupt:
        return


@contextmanager
def _screen(url: str, every_s: float) -> Iterator[Show]:
    """A screen that is drawn anew each time; without a terminal, a line each time."""
    if not sys.stdout.isatty():
        yield _print_line
        return
    from rich.console import Console
    from rich.live import Live

    last: list[View] = []
    with Live(console=Console(), screen=True, auto_refresh=False) as live:

        def show(view: View | None, wrong: str) -> None:
            if view is not None:
                last[:] = [view]
                live.update(_picture(url, every_s, view, wrong), refresh=True)

        try:
            yield show
        finally:
            live.stop()
            if last:  # the screen is gone: leave what it said
                _print_line(last[0], "")


def _print_line(view: View | None, wrong: str) -> None:
    if wrong:
        print(f"headstart: {wrong}", file=sys.stderr, flush=True)
    elif view is not None:
        first = view.diagnosis.findings[:1]
        parts = [_verdict(view), *(str(each.evidence[0]) for each in first)]
        parts += [f"{each.key} {each.now}" for each in view.moving]
        print("; ".join(parts), flush=True)


def _picture(url: str, every_s: float, view: View, wrong: str) -> RenderableType:
    """All text is `Text`: what comes from a server is no markup."""
    from rich.console import Group
    from rich.text import Text

    style = {"no fault": "bold green", "cannot say": "bold yellow"}
    verdict = _words(view)
    parts: list[RenderableType] = [
        Text(f"{url}, every {format_seconds(every_s)}, scrape {view.num_scrapes}. Ctrl-C ends."),
        Text(f"Figures are of {_span(view, every_s)}.", style="dim"),
    ]
    if wrong:
        parts.append(Text(f"{wrong}; below is what was known before", style="bold red"))
    parts += [Text(), Text(_verdict(view), style=style.get(verdict, "bold red"))]
    parts += [Text(f"  {each}") for each in view.diagnosis.healthy]
    for finding in view.diagnosis.findings:
        name = str(finding.cause).replace("_", " ")
        parts.append(Text(f"\n{name}, {finding.confidence:.0%} sure", style="bold"))
        parts += [Text(f"  {each}") for each in finding.evidence[:_MAX_EVIDENCE]]
        parts += [Text(f"  fix: {each}", style="cyan") for each in finding.fixes[:_MAX_FIXES]]
    parts += [Text(), _table(view.moving)]
    if view.diagnosis.missing:
        parts.append(Text(f"\nTo be surer, add a file with {view.diagnosis.missing[0]}"))
    parts += [Text(f"Not used: {each}", style="dim") for each in view.diagnosis.notes[:3]]
    return Group(*parts)


def _table(moving: Sequence[Moving]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    if not moving:
        return Text("No figure has moved yet.", style="dim")
    table = Table(box=None, pad_edge=False)
    table.add_column("what moves")
    table.add_column("now", justify="right")
    table.add_column("")
    for each in moving:
        table.add_row(Text(each.key), Text(each.now), Text(spark(each.values)))
    return table


def spark(values: Sequence[float]) -> str:
    """A line of bars, from the smallest value to the largest."""
    low, high = min(values), max(values)
    if high <= low:
        return _BARS[0] * len(values)
    return "".join(_BARS[round((v - low) / (high - low) * (len(_BARS) - 1))] for v in values)


def _span(view: View, every_s: float) -> str:
    from headstart.doctor.watch import WINDOW

    if view.is_since_start:
        return "all since the server's start, as this is the first scrape"
    return f"the last {format_seconds(min(view.num_scrapes - 1, WINDOW) * every_s)}"


def _words(view: View) -> str:
    return str(view.diagnosis.verdict).replace("_", " ")


def _verdict(view: View) -> str:
    return f"verdict: {_words(view)}"
