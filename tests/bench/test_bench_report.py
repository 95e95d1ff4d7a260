"""The page of a report: whole, without the network, of a bearable size, and safe."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import msgspec
import pytest

pytest.importorskip("matplotlib")

from headstart.bench.groups import group_runs
from headstart.bench.plots import MAX_DRAWN, phase_starts, tier_shares
from headstart.bench.report import (
    make_report,
    not_measured,
    overview,
    report_document,
    report_html,
)
from headstart.bench.run import Run
from headstart.bench.slo import Slo, parse_slo

VOID = {"meta", "br", "img", "link", "input"}
NO_SLO = Slo()


class PhasedRun(Run, frozen=True, kw_only=True):
    """A run that tells more."""

    phase: str = ""
    hit_tokens_by_tier: dict[str, int] | None = None


def phased(run, **changed):
    known = {name: getattr(run, name) for name in run.__struct_fields__}
    return PhasedRun(**{**known, **changed})


def page_of(runs, slo=NO_SLO):
    return report_html(make_report([("file", each) for each in runs], slo))


class Page(HTMLParser):
    """Tags, the text of each table's cells, and the labels of its pictures."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.attributes, self.labels = [], set(), [], []
        self.tables, self.words = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "svg":
            self.labels += [value for name, value in attrs if name == "aria-label"]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def test_the_page_is_whole_and_refers_to_nothing(run):
    page = page_of([run(arm="old"), run(0.5, seed=1, arm="new")], parse_slo("ttft=1s"))
    parsed = Page(page)
    assert parsed.open == []
    assert not parsed.seen & {"script", "link", "iframe", "img"}
    assert "http" not in page
    assert not re.findall(r'(?:href|src)="(?!#)', page)
    assert not re.findall(r"url\((?!#)", page)
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    assert len(parsed.labels) == 3, "distribution, over time, tiers"
    assert all(parsed.labels)


def test_all_figures_are_in_tables(run):
    parsed = Page(page_of([run(arm="old"), run(0.5, seed=1, arm="new")], parse_slo("ttft=1s")))
    overview_table = parsed.tables[0]
    titles = dict(zip(overview_table[0], overview_table[2], strict=True))
    assert (titles["run"], titles["requests"], titles["TTFT p99, ms"]) == (
        *("new", "40"),
        "too few: 40 of 368",
    )
    assert titles["TTFT p50, ms"].startswith("500.0 (")
    assert titles["goodput/s"]
    details = {row[0]: row[1:] for row in parsed.tables[-1]}
    assert details[""] == ["old", "new"]
    assert [each.split()[0] for each in details["TPOT p50, ms"]] == ["10.0", "10.0"]
    assert details["meet ttft <= 1 s"][0] == "50.0%"


HOSTILE = [
    "<script>alert(1)</script>",
    '"><svg onload=alert(1)>',
    "a & b &amp; $x_1$ \\frac{1}{2} %s {0}",
    "_hidden",
    "\ud800\x00\x1b[31m名前 🙂",
    "x" * 500,
    "x" * 499 + "y",
]


def test_names_are_text_and_nothing_else(run):
    runs = [
        phased(run(seed=n, arm=name, workload=name), phase=name, hit_tokens_by_tier={name: 100})
        for n, name in enumerate(HOSTILE)
    ]
    page = page_of(runs)
    page.encode()  # as it is written
    parsed = Page(page)
    assert parsed.open == []
    assert not parsed.seen & {"script", "link", "iframe", "img"}
    assert not any(name.startswith("on") for name, _ in parsed.attributes)
    text = "".join(parsed.words)
    for told in ("<script>alert(1)</script>", "a & b &amp; $x_1$", "_hidden", "名前 🙂"):
        assert told in text
    names = [row[0] for row in parsed.tables[0][1:]]
    assert len(set(names)) == len(HOSTILE), "what is cut to the same is told apart"


def test_a_hundred_thousand_requests_make_no_large_page(run):
    page = page_of([run(count=100_000)])
    assert len(page) < 1_000_000
    assert "100,000 requests" in page


def test_lines_that_cannot_be_told_apart_are_only_in_the_tables(run):
    page = page_of([run(seed=n, arm=f"arm {n}") for n in range(MAX_DRAWN + 3)])
    assert "3 more are only in the tables" in page
    assert f"arm {MAX_DRAWN + 2}" in page


def test_runs_at_several_paces_make_a_curve(run):
    paced = [run(0.2 * n, seed=n, arm="a", pace={"rate": float(n)}) for n in (1, 2, 4)]
    assert "against throughput" in page_of(paced)
    assert "rate 4" in page_of(paced)
    assert "against throughput" not in page_of([run(arm="a"), run(seed=1, arm="b")])


def test_groups_are_of_one_arm_phase_and_pace(run):
    runs = [run(seed=n, arm=arm) for n, arm in enumerate(("a", "b", "a"))]
    groups = group_runs([("f", each) for each in runs])
    assert [(g.name, len(g.runs)) for g in groups] == [("a", 2), ("b", 1)]
    assert group_runs([("file", run())])[0].name == "file", "without an arm"
    phases = [phased(run(seed=n, arm="a"), phase=p) for n, p in enumerate(("cold", "steady"))]
    groups = group_runs([("f", each) for each in phases])
    assert [(g.name, g.timeline, g.curve) for g in groups] == [
        ("a, cold", "a", "a, cold"),
        ("a, steady", "a", "a, steady"),
    ]
    assert phase_starts(groups) == {"cold": 0.0, "steady": 10.0}
    assert "steady" in page_of(phases)


def test_shares_by_tier_are_of_all_prompt_tokens(run):
    made = run(count=10)
    asked, cached = sum(r.prompt_tokens for r in made.requests), 500
    told = phased(made, hit_tokens_by_tier={"memory": 300, "file": 150})
    (group,) = group_runs([("f", told)])
    assert tier_shares(group) == {
        "memory": pytest.approx(300 / asked),
        "file": pytest.approx(150 / asked),
        "cached": pytest.approx((cached - 450) / asked),
        "computed": pytest.approx((asked - cached) / asked),
    }
    (group,) = group_runs([("f", made)])
    assert tier_shares(group).keys() == {"cached", "computed"}
    silent = tuple(msgspec.structs.replace(r, cached_tokens=None) for r in made.requests)
    silent = msgspec.structs.replace(made, requests=silent)
    assert tier_shares(group_runs([("f", silent)])[0]) == {}
    assert "came from</h2>" not in page_of([silent])


def test_what_was_not_measured_is_said(run):
    told = not_measured(make_report([("f", run())], NO_SLO))
    assert any("times between tokens" in each for each in told)
    assert any("an arm with one run" in each for each in told)
    assert any("p99: too few" in each for each in told)
    assert not any("hits: the server" in each for each in told)
    assert not any("cold devices" in each for each in told)
    page = page_of([run()])
    assert all(each.split("`")[0] in page for each in told)
    assert "headstart gate" in page


def test_what_speaks_against_a_run_stands_at_the_top(run):
    late = run(0.001, arm="late")
    failed = msgspec.structs.replace(late.requests[0], error="HTTP 500", ttft_s=None)
    late = msgspec.structs.replace(late, requests=(failed, *late.requests[1:]))
    top = page_of([late], parse_slo("mlperf-llama2-70b-server")).partition("<table")[0]
    assert "The client sent late" in top
    assert "1 requests failed" in top
    assert "not MLPerf" in top


@pytest.mark.parametrize("count", [1, 2, 40])
def test_few_and_equal_times_are_drawn_too(run, count):
    page_of([run(count=count, sigma=0.0)])
    bare = tuple(
        msgspec.structs.replace(r, intended_s=None, sent_s=None, cached_tokens=None)
        for r in run(count=count).requests
    )
    page_of([msgspec.structs.replace(run(), requests=bare, pace=None)])


def test_the_document_has_a_row_a_run(run):
    report = make_report([("f", run(arm="a")), ("f", run(arm="a", seed=1))], parse_slo("ttft=1s"))
    told = json.loads(json.dumps(report_document(report), allow_nan=False))
    assert told["schema"] == "headstart.bench.report/1"
    assert [each["name"] for each in told["runs"]] == ["a #1", "a #2"]
    assert told["groups"][0]["runs"] == 2
    assert sum(told["groups"][0]["shares_by_source"].values()) == pytest.approx(1.0)
    assert told["runs"][0]["slo"]["share"] == 0.5
    columns, rows = overview(report)
    assert {len(columns)} == {len(row) for row in rows}
