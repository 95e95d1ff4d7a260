"""`headstart bench report`: files in, a table, JSON and a page out."""

from __future__ import annotations

import json

import msgspec
import pytest

from headstart import figure
from headstart.bench.run import Request, Run
from headstart.cli.main import main

pytest.importorskip("matplotlib")

SGLANG = {
    "backend": "sglang",
    "request_rate": 2.0,
    "duration": 4.0,
    "ttfts": [0.5, 0.25],
    "itls": [[0.1, 0.2], []],
    "input_lens": [100, 200],
    "output_lens": [3, 1],
    "errors": ["", ""],
}


@pytest.fixture
def own(tmp_path):
    requests = tuple(
        Request(
            session=str(n),
            prompt_tokens=100,
            output_tokens=2,
            ttft_s=0.5 + n / 100,
            latency_s=1.0 + n / 100,
            cached_tokens=40,
        )
        for n in range(10)
    )
    path = tmp_path / "own.json"
    run = Run(tool="headstart", duration_s=10.0, requests=requests, arm="mine")
    path.write_bytes(msgspec.json.encode(run))
    return path


@pytest.fixture
def sglang(tmp_path):
    path = tmp_path / "theirs.json"
    path.write_text(f"{json.dumps(SGLANG)}\n{json.dumps({**SGLANG, 'request_rate': 4.0})}\n")
    return path


def ended(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(["bench", "report", *map(str, args)])
    return end.value.code or 0, capsys.readouterr()


def test_runs_of_several_tools_stand_side_by_side(own, sglang, capsys, tmp_path):
    page = tmp_path / "out" / "page.html"
    words = ("--slo", "ttft=505ms", "--html", page)
    code, printed = ended(capsys, own, sglang, *words)
    assert code == 0
    rows = printed.out.splitlines()
    assert [row.split("  ")[0] for row in rows[2:5]] == [
        "mine, headstart",
        "theirs, sglang, rate 2",
        "theirs, sglang, rate 4",
    ]
    assert "10.0%" in rows[2], "one of ten"
    assert "not measured" in printed.out
    assert "theirs, sglang, rate 4" in page.read_text(encoding="utf-8")
    assert "against throughput" in page.read_text(encoding="utf-8")


def test_json_is_all_that_stdout_gets(own, sglang, capsys):
    code, printed = ended(capsys, own, sglang, "--json", "-")
    told = json.loads(printed.out)
    assert (code, told["schema"], len(told["runs"])) == (0, "headstart.bench.report/1", 3)
    assert told["runs"][0]["ttft_s"]["p50"]["value"] == 0.54
    assert told["runs"][1]["itl_s"]["count"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("none.json",), "none.json cannot be read"),
        (("--slo", "fast"), "Missing argument"),
        (("{own}", "--slo", "fast"), "--slo 'fast' is unknown"),
        (("{own}", "--html", "/proc/none/x"), "--html /proc/none/x: cannot be written"),
        (("{own}", "--json", "/proc/none/x"), "--json /proc/none/x: cannot be written"),
    ],
)
def test_wrong_usage_ends_with_2(own, capsys, words, message):
    code, printed = ended(capsys, *(word.format(own=own) for word in words))
    assert (code, message in printed.err) == (2, True)


def test_a_page_needs_matplotlib_and_a_table_does_not(own, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(figure, "find_spec", lambda name: None)
    assert ended(capsys, own)[0] == 0
    code, printed = ended(capsys, own, "--html", tmp_path / "page.html")
    assert (code, "pip install 'headstart[report]'" in printed.err) == (2, True)
    assert not (tmp_path / "page.html").exists()
