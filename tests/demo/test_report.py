"""The report: one page that refers to nothing outside itself."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")

from headstart.demo.report import PHASE_COLUMNS, phase_rows, report_html, write_plot

VOID = {"meta", "br", "img", "link", "input"}


class Balance(HTMLParser):
    """Checks that tags are closed in the order in which they were opened."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.seen = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)


def test_the_page_is_whole_and_refers_to_nothing(make_result):
    page = report_html(make_result())
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert not parser.seen & {"script", "link", "iframe", "img"}
    assert "http" not in page
    assert page.count("<svg") == 4
    assert not re.findall(r'href="(?!#)', page)


def test_text_is_escaped(make_result):
    page = report_html(make_result())
    assert "Why &lt;b&gt;?" in page
    assert "Because &amp; so." in page


def test_the_headline_says_how_much_faster_and_whether_answers_are_the_same(make_result):
    assert "40 times sooner" in report_html(make_result())
    assert "Every answer is identical" in report_html(make_result())
    assert "Answers differ" in report_html(make_result(differences=(0,)))


def test_a_missing_counter_is_said(make_result):
    assert "does not count" in report_html(make_result(device=None))


def test_one_row_a_phase(make_result):
    rows = phase_rows(make_result())
    assert [len(row) for row in rows] == [len(PHASE_COLUMNS)] * 4
    assert rows[3][1:4] == ("500 ms", "40x", "5,568")
    assert rows[3][7] == "1.00"


def test_the_plot_is_a_png(make_result, tmp_path):
    write_plot(make_result(), tmp_path / "images" / "demo.png")
    assert (tmp_path / "images" / "demo.png").read_bytes().startswith(b"\x89PNG")
