"""Runs side by side: an overview, one page of HTML that needs nothing but itself, and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape

from headstart.bench.groups import Group, group_runs
from headstart.bench.plots import (
    MAX_BARS,
    MAX_DRAWN,
    curve_svg,
    curves_of,
    distribution_svg,
    has_moments,
    keys,
    looks,
    over_time_svg,
    tier_colors,
    tier_shares,
    tiers_svg,
    timelines,
)
from headstart.bench.run import Run
from headstart.bench.slo import Slo
from headstart.bench.summary import (
    SHARES,
    Summary,
    document,
    figures,
    summarise,
    told,
    told_share,
)
from headstart.page import html_keys, html_page, html_table
from headstart.units import format_seconds

SCHEMA = "headstart.bench.report/1"
OVERVIEW = (
    *("run", "requests", "failed", "TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "ITL p99, ms"),
    *("output tokens/s", "hits"),
)
OVERVIEW_SLO = ("meet the SLO", "goodput/s")
_RUNS_ABREAST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of a report."""

    name: str
    group: Group
    run: Run
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that is told."""

    groups: tuple[Group, ...]
    runs: tuple[Measured, ...]
    slo: Slo


def make_report(named: Iterable[tuple[str, Run]], slo: Slo) -> Report:
    """Of runs, each with the name of its file. At least one."""
    groups = group_runs(named)
    runs = [
        Measured(
            name=f"{group.name} #{number}" if len(group.runs) > 1 else group.name,
            group=group,
            run=run,
            summary=summarise(run, slo),
        )
        for group in groups
        for number, run in enumerate(group.runs, start=1)
    ]
    return Report(groups=tuple(groups), runs=tuple(runs), slo=slo)


def report_document(report: Report) -> dict[str, object]:
    """What `headstart bench report --json` writes."""
    return {
        "schema": SCHEMA,
        "groups": [
            {
                "name": group.name,
                "arm": group.arm,
                "phase": group.phase,
                "workload": group.workload,
                "tool": group.tool,
                "pace": group.pace,
                "runs": len(group.runs),
                "shares_by_source": tier_shares(group),
            }
            for group in report.groups
        ],
        "runs": [{"name": each.name, **document(each.summary)} for each in report.runs],
        "not_measured": not_measured(report),
    }


def overview(report: Report) -> tuple[tuple[str, ...], list[list[str]]]:
    """Titles and a row a run, as text for people."""
    columns = OVERVIEW + (OVERVIEW_SLO if report.slo.limits else ())
    return columns, [_overview_row(each) for each in report.runs]


def _overview_row(each: Measured) -> list[str]:
    summary = each.summary
    row = [each.name, str(summary.num_requests), str(summary.num_failed)]
    for time, quantile in (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("itl", "p99")):
        times = summary.times[time]
        row.append(
            told(times.quantiles[quantile], SHARES[quantile], times.num) if times.num else "-"
        )
    row += [f"{summary.output_tokens_per_s:.1f}", told_share(summary.hit_rate)]
    if summary.slo_share is not None:
        row += [told_share(summary.slo_share), f"{summary.goodput_per_s:.3g}"]
    return row


def not_measured(report: Report) -> list[str]:
    """What these runs cannot say, for people."""
    runs = [each.run for each in report.runs]
    summaries = [each.summary for each in report.runs]
    missing = {
        "the times between tokens: not told": any(
            not summary.times["itl"].num for summary in summaries
        ),
        "hits: the server does not tell them": any(s.hit_rate is None for s in summaries),
        "the hit rate that is possible: not told": any(
            s.possible_hit_rate is None for s in summaries
        ),
        "which tier hits came from: not told": any(run.hit_tokens_by_tier is None for run in runs),
        "whether the client sent in time: not told": any(s.send_lag_s is None for s in summaries),
        "whether cold devices were cold: their bytes were not counted": any(
            None in (run.read_nbytes, run.loaded_nbytes) for run in runs
        ),
        "how much runs differ: an arm with one run does not tell": any(
            len(group.runs) < 2 for group in report.groups
        ),
        "p99: too few answers": any(s.times["ttft"].quantiles["p99"] is None for s in summaries),
        "how long requests would queue: a closed loop sends less to a slow server": any(
            run.pace is not None and not run.is_open_loop for run in runs
        ),
    }
    found = [told for told, is_missing in missing.items() if is_missing]
    return [*found, "whether answers are right: `headstart gate` compares those of two arms"]


def report_html(report: Report) -> str:
    """The whole page. Raises ConfigError when matplotlib is not installed."""
    columns, rows = overview(report)
    return html_page(
        "Headstart bench",
        [
            *_headline(report),
            html_table(
                columns,
                rows,
                numbers=range(1, len(columns)),
                caption="A row a run; in brackets 95 % intervals.",
            ),
            *_distribution(report),
            *_over_time(report),
            *_curve(report),
            *_tiers(report),
            *_spread(report),
            "<h2>All figures</h2>",
            *_figure_tables(report),
            "<h2>How to read this, and what was not measured</h2>",
            *_reading(report),
        ],
    )


def _headline(report: Report) -> Iterator[str]:
    runs, num_groups = report.runs, len(report.groups)
    asked = sum(each.summary.num_requests for each in runs)
    failed = sum(each.summary.num_failed for each in runs)
    yield "<h1>Headstart bench</h1>"
    yield (
        f"<p>{len(runs)} {'run' if len(runs) == 1 else 'runs'} of {num_groups} "
        f"{'arm' if num_groups == 1 else 'arms, phases or paces'}, {asked:,} requests.</p>"
    )
    if report.slo.limits:
        yield f"<p>SLO: {escape(str(report.slo))}. {escape(report.slo.note)}</p>"
    if failed:
        yield f'<p class="bad">{failed:,} requests failed; the kinds are below.</p>'
    if late := [each.name for each in runs if each.summary.is_sent_late]:
        yield (
            '<p class="bad">The client sent late, so these times are partly its own: '
            f"{escape('; '.join(late))}.</p>"
        )


def _distribution(report: Report) -> Iterator[str]:
    yield "<h2>Time to the first token</h2>"
    yield _figure(
        distribution_svg(report.groups),
        "The further left, the sooner. Runs of one arm are taken together."
        + _left_out(len(report.groups) - MAX_DRAWN),
        keys(looks([group.name for group in report.groups])),
    )


def _over_time(report: Report) -> Iterator[str]:
    if has_moments(report.groups):
        yield "<h2>Time to the first token, over time</h2>"
        yield _figure(
            over_time_svg(report.groups),
            "Points are requests, by when they should have been sent (thinned out where there are "
            "many); lines are medians of all of them. A phase begins where the longest before it "
            "ended.",
            keys(timelines(report.groups)),
        )


def _curve(report: Report) -> Iterator[str]:
    curves = curves_of((each.group, each.summary) for each in report.runs)
    if curves:
        yield "<h2>First token against throughput</h2>"
        yield _figure(
            curve_svg(curves),
            "A point a run: filled the median, hollow p99 where there are answers enough. Where a "
            "curve turns up, more load brings no more tokens.",
            keys(looks(list(curves))),
        )


def _tiers(report: Report) -> Iterator[str]:
    shares = [(group.name, found) for group in report.groups if (found := tier_shares(group))]
    if shares:
        colors = tier_colors(report.groups)
        yield "<h2>Where the prompts' KV came from</h2>"
        yield _figure(
            tiers_svg(report.groups),
            "Of the prompt tokens of answered requests. Cached: the tier is not told."
            + _left_out(len(shares) - MAX_BARS),
            html_keys((name, color, "") for name, color in colors.items()),
        )
        rows = [
            [name, *(f"{found.get(tier, 0.0):.1%}" for tier in colors)] for name, found in shares
        ]
        yield html_table(["arm", *colors], rows, numbers=range(1, len(colors) + 1))


def _spread(report: Report) -> Iterator[str]:
    rows = []
    for group in report.groups:
        if len(group.runs) > 1:
            medians = [run.ttft_s(0.5) for run in group.runs]
            rates = [run.output_tokens_per_s for run in group.runs]
            rows.append(
                [
                    group.name,
                    str(len(group.runs)),
                    f"{format_seconds(min(medians))} to {format_seconds(max(medians))}",
                    f"{min(rates):.1f} to {max(rates):.1f}",
                ]
            )
    if rows:
        yield "<h2>How much runs differ</h2>"
        yield html_table(["arm", "runs", "TTFT p50", "output tokens/s"], rows, numbers=(1, 2, 3))


def _figure_tables(report: Report) -> Iterator[str]:
    for start in range(0, len(report.runs), _RUNS_ABREAST):
        some = report.runs[start : start + _RUNS_ABREAST]
        told_of = [dict(figures(each.summary)) for each in some]
        titles = dict.fromkeys(title for each in told_of for title in each)
        rows = [[title, *(each.get(title, "-") for each in told_of)] for title in titles]
        names = [each.name for each in some]
        yield html_table(["", *names], rows, numbers=range(1, len(some) + 1))


def _reading(report: Report) -> Iterator[str]:
    yield (
        "<p>TTFT is the time from when a request should have been sent to its first token that is "
        "not empty; TPOT the time for each later token, on average of a request; ITL that between "
        "two pieces of an answer; latency that to the last token. In brackets stands the 95 % "
        "interval of a quantile of this run, with sessions as the unit, since requests of one "
        "session are not independent. It does not say how much another run would differ: to "
        "compare arms, measure them in pairs and let <code>headstart gate</code> judge. Hits are "
        "the share of prompt tokens that the server says it had cached; what is possible is "
        "computed from the load. Goodput counts the requests that meet every limit of the SLO, a "
        "second; failures meet none.</p>"
    )
    items = "".join(f"<li>{escape(each)}</li>" for each in not_measured(report))
    yield f"<p>Not measured, or not for every run:</p><ul>{items}</ul>"


def _figure(svg: str, caption: str, key: str) -> str:
    return f"<figure>{key}{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _left_out(more: int) -> str:
    return f" {more} more are only in the tables." if more > 0 else ""
