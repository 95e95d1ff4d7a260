"""The verdicts in docs/benchmarks.md are those of `headstart gate` on the committed runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headstart.cli.main import app

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "benchmarks" / "results" / "serve"
EXIT_CODES = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 2}


def told():
    """Load, phase and verdict of each row of the table."""
    load = ""
    for line in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and cells[-1] in EXIT_CODES:
            load = re.sub(":.*", "", cells[0]) or load
            yield load, cells[1], cells[-1]


def test_every_load_is_told():
    assert {load for load, _, _ in told()} == {path.stem for path in RUNS.glob("*.json")} - {"none"}


@pytest.mark.parametrize(("load", "phase", "verdict"), list(told()))
def test_the_gate_says_so(load, phase, verdict):
    runs = RUNS / f"{load}.json"
    words = ["--baseline", f"{runs}#gpu-prefix/{phase}", "--slo", "ttft=10s"]
    done = CliRunner().invoke(app, ["gate", *words, "--candidate", f"{runs}#headstart/{phase}"])
    assert done.exit_code == EXIT_CODES[verdict], done.output


def test_no_prefix_cache_is_no_baseline():
    runs = RUNS / "none.json"
    words = ["--baseline", f"{runs}#none/cold", "--candidate", f"{runs}#gpu-prefix/cold"]
    done = CliRunner().invoke(app, ["gate", *words])
    assert done.exit_code == 3
    assert "--no-reuse-baseline" in done.output
