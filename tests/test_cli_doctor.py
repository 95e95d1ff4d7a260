"""`headstart doctor`: exit codes, JSON, and what is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from headstart.cli.main import main

CASES = Path(__file__).parent / "doctor" / "cases"


def ended(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(["doctor", *map(str, args)])
    return end.value.code, capsys.readouterr()


def test_causes_found(capsys):
    code, printed = ended(capsys, CASES / "degraded_storage.toml")
    assert code == 1
    for words in ("slow tier", "confidence", "degraded_storage.toml:", "fix", "773 MB/s"):
        assert words in printed.out


def test_the_example_of_the_page(capsys, tmp_path, monkeypatch):
    page = (CASES.parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    example = page.partition("$ headstart doctor storage.toml\n")[2].partition("```")[0]
    shutil.copy(CASES / "degraded_storage.toml", tmp_path / "storage.toml")
    monkeypatch.chdir(tmp_path)
    _, printed = ended(capsys, "storage.toml")
    assert len(example.splitlines()) > 8
    assert set(example.splitlines()) <= set(printed.out.splitlines())


def test_no_fault(capsys):
    code, printed = ended(capsys, CASES / "plainly_better.toml")
    assert code == 0
    assert "no fault" in printed.out
    assert "56.5 % sooner" in printed.out


def test_cannot_say_and_what_to_measure(capsys):
    code, printed = ended(capsys, CASES / "only_a_time.toml")
    assert code == 2
    assert "cannot say" in printed.out
    assert "measure" in printed.out


def test_json_is_all_that_stdout_gets(capsys):
    code, printed = ended(capsys, CASES / "degraded_storage.toml", "--json", "-")
    document = json.loads(printed.out)
    assert (code, document["schema"], document["verdict"]) == (1, "headstart.doctor/1", "slow_tier")
    finding = document["findings"][0]
    assert finding["cause"] == "slow_tier"
    assert 0.0 < finding["confidence"] <= 1.0
    assert finding["explained_s"] == pytest.approx(6.56)
    assert finding["evidence"]
    assert finding["fix"]
    assert document["ttft"][0]["ttft_s"] == 18.5
    assert isinstance(document["missing"], list)


def test_several_files_add_up(tmp_path, capsys):
    times = tmp_path / "times.toml"
    times.write_text('ttft_p50 = "2 s"\nhit_rate = 0.9\n')
    stages = tmp_path / "stages.toml"
    stages.write_text('lookup = "1.5 s"\n')
    assert ended(capsys, times)[0] == 2
    code, printed = ended(capsys, times, stages, "--json", "-")
    assert (code, json.loads(printed.out)["verdict"]) == (1, "lookup_cpu")


def test_a_misspelt_key_is_wrong_usage(tmp_path, capsys):
    path = tmp_path / "x.toml"
    path.write_text("ttft_p55 = 1\n")
    code, printed = ended(capsys, path)
    assert code == 2
    assert "did you mean" in printed.err
    assert printed.out == ""


def test_an_unknown_file_is_named(tmp_path, capsys):
    path = tmp_path / "notes.md"
    path.write_text("slow\n")
    code, printed = ended(capsys, path)
    assert code == 2
    assert "notes.md: of no kind that is known" in printed.out


def test_no_file_is_wrong_usage(capsys):
    assert ended(capsys)[0] == 2
