"""The page of `headstart doctor --html`: whole, without the network, and safe."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")

import doctor_docs
from headstart.cli.main import main
from headstart.doctor.diagnose import diagnose
from headstart.doctor.facts import Fact, Known, Source
from headstart.doctor.html_report import diagnosis_html
from headstart.errors import ConfigError

VOID = {"meta", "br"}
HOSTILE = [
    "<script>alert(1)</script>",
    '"><svg onload=alert(1)>',
    "a & b &amp; $x_1$ \\frac{1}{2} %s {0}",
    "$\\bad{",
    "\ud800\x00\x1b[31m名前 🙂",
    "x" * 500,
]


class Page(HTMLParser):
    """Tags, attributes, table cells, and all text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.attributes, self.words, self.rows = [], set(), [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    @property
    def text(self):
        return "".join(self.words)


def case(name):
    (found,) = [each for each in doctor_docs.cases() if each.name == name]
    return diagnosis_html(diagnose(Known(found.facts)))


def fact(key, value, scope="top", owner="", path="x.toml"):
    return Fact(key=key, value=value, source=Source(path=path, line=1), scope=scope, owner=owner)


def is_safe(page):
    parsed = Page(page)
    assert parsed.open == []
    assert not parsed.seen & {"script", "link", "iframe", "img", "a"}
    assert not any(name.startswith("on") for name, _ in parsed.attributes)
    assert not re.findall(r'(?:href|src)="(?!#)', page)
    assert not re.findall(r"url\((?!#)", page)
    page.encode()
    return parsed


def test_the_page_says_what_the_screen_says():
    page = case("degraded_storage")
    parsed = is_safe(page)
    assert "http" not in page
    for told in ("Verdict: slow tier", "85% sure, explains 6.56 s", "degraded_storage.toml:"):
        assert told in parsed.text
    assert "FP8 KV halves the break-even bandwidth" in parsed.text
    titles, row = parsed.rows
    cells = dict(zip(titles, row, strict=True))
    assert (cells["arm"], cells["first token"]) == ("from storage", "18.5 s")
    assert (cells["load"], cells["rest"], cells["queue"]) == ("~ 18.6 s", "~ -60 ms", "-")


def test_a_healthy_one_and_one_of_which_nothing_is_known():
    healthy = is_safe(case("plainly_better")).text
    assert "Verdict: no fault" in healthy
    assert "As it should be: with hits the first token" in healthy
    nothing = is_safe(diagnosis_html(diagnose(Known(())))).text
    assert "Verdict: cannot say" in nothing
    assert "arms.ttft_p50" in nothing


@pytest.mark.parametrize(
    "folder", [doctor_docs.CASES, doctor_docs.BLIND], ids=lambda each: each.name
)
def test_every_stage_of_every_case_has_a_colour(folder):
    from headstart.doctor.html_report import _COLORS

    stages = {
        stage.name
        for _, said in doctor_docs.judged(folder)
        for split in said.splits
        for stage in split.stages
    }
    assert stages <= set(_COLORS)


def test_stages_are_drawn_to_scale():
    known = Known(
        [fact(key, value) for key, value in {"ttft_p50": 2.0, "queue": 0.5, "load": 1.0}.items()]
    )
    page = diagnosis_html(diagnose(known))
    widths = {}
    for color, stage in (("#d98f4a", "queue"), ("#4a90d9", "load"), ("#b9bec6", "rest")):
        # The first shape of that colour inside the picture; the one before it is the key.
        path = re.search(rf'<path d="([^"]*)"[^>]*style="fill: {color}', page)
        xs = [float(x) for x, _ in re.findall(r"[ML] ?([\d.]+) ([\d.]+)", path[1])]
        widths[stage] = max(xs) - min(xs)
    assert widths["load"] == pytest.approx(2 * widths["queue"], rel=0.01)
    assert widths["rest"] == pytest.approx(widths["queue"], rel=0.01)


def test_names_paths_and_values_are_text_and_nothing_else():
    facts = [fact("engine", HOSTILE[0])]
    for name in HOSTILE:
        for key, value in {"name": name, "cache": "warm", "ttft_p50": 2.0, "load": 1.5}.items():
            facts.append(fact(key, value, "arms", name, path=name))
        facts.append(fact("serialize", 1.2, "arms", name, path=name))
    said = diagnose(Known(facts), skipped=HOSTILE)
    assert said.findings
    parsed = is_safe(diagnosis_html(said))
    for told in ("<script>alert(1)</script>", "a & b &amp; $x_1$", "名前 🙂"):
        assert told in parsed.text


def test_many_arms_are_only_in_the_table():
    facts = []
    for number in range(30):
        for key, value in {
            "name": f"arm {number}",
            "cache": "off",
            "ttft_p50": 1.0,
            "queue": 0.5,
        }.items():
            facts.append(fact(key, value, "arms", str(number)))
    page = diagnosis_html(diagnose(Known(facts)))
    assert "6 more are only in the table." in page
    assert len(Page(page).rows) == 31


def test_the_option(tmp_path, capsys):
    path = tmp_path / "new" / "page.html"
    with pytest.raises(SystemExit) as end:
        main(["doctor", str(doctor_docs.CASES / "degraded_storage.toml"), "--html", str(path)])
    assert end.value.code == 1
    assert "slow tier" in capsys.readouterr().out
    assert is_safe(path.read_text(encoding="utf-8")).text.count("slow tier") >= 2


def test_what_is_wrong_is_said_before_work(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    args = ["doctor", str(doctor_docs.CASES / "degraded_storage.toml"), "--html"]
    with pytest.raises(SystemExit) as end:
        main([*args, str(tmp_path / "file" / "page.html")])
    assert end.value.code == 2
    assert "--html" in capsys.readouterr().err

    def absent():
        raise ConfigError("plots need matplotlib; get it with: pip install 'headstart[report]'")

    monkeypatch.setattr("headstart.figure.check_installed", absent)
    with pytest.raises(SystemExit) as end:
        main([*args, str(tmp_path / "page.html")])
    assert end.value.code == 2
    assert "headstart[report]" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
