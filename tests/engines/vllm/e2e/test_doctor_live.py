"""`headstart doctor` on servers that are well, and not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[4] / "benchmarks" / "vllm_doctor.py"


@pytest.mark.parametrize(
    ("scenario", "verdict"), [("healthy", "no_fault"), ("slow_tier", "slow_tier")]
)
def test_the_verdict_is_right(tmp_path, scenario, verdict):
    """The same as in the whole series, whose results are kept: two scenarios of the six."""
    found = tmp_path / "found.json"
    words = [sys.executable, str(SCRIPT), "--only", scenario, "--json", str(found)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(found.read_text())["scenarios"][scenario]
    assert told["verdict"] == verdict
    assert told["schema"] == "headstart.doctor/1"
