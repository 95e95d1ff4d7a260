"""Every command of the README runs as it stands there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def commands() -> list[str]:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    found, inside = [], False
    for line in lines:
        if line.startswith("```"):
            inside = line == "```console"
        elif inside and line.strip():
            found.append(line.split(" #")[0].strip())
    return found


def run(
    *command: str, cwd: Path = ROOT, timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PATH": path},
    )


TESTED = {
    "make demo",
    "make test",
    "pip install .",
    "headstart --help",
    "headstart config show",
    "headstart bench storage",
    "headstart serve MODEL",
    "headstart node start",
    "headstart node status",
    "headstart node stop",
}


def test_every_command_has_a_test_here():
    assert set(commands()) == TESTED


def test_make_test_runs_pytest():
    done = run("make", "--dry-run", "test")
    assert done.returncode == 0
    assert "-m pytest" in done.stdout


@pytest.mark.parametrize("command", ["headstart --help", "headstart config show"])
def test_quick_commands(command, tmp_path):
    done = run(*command.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_node(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HEADSTART_MEMORY__CAPACITY", "16MiB")
    started = run("headstart", "node", "start")
    assert started.returncode == 0, started.stderr
    try:
        status = run("headstart", "node", "status")
        assert status.returncode == 0, status.stderr
        assert "0 engines" in status.stdout
    finally:
        stopped = run("headstart", "node", "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert run("headstart", "node", "status").returncode == 2


def test_serve():
    done = run("headstart", "serve", "MODEL", "--dry-run")
    if find_spec("vllm") is None:
        assert done.returncode == 2
        assert "pip install" in done.stderr
    else:  # tests/engines/vllm runs it
        assert done.returncode == 0, done.stderr
        assert "HeadstartConnector" in done.stdout


def test_pip_install(tmp_path):
    target = ("--no-deps", "--quiet", "--target", str(tmp_path / "site"))
    done = run(sys.executable, "-m", "pip", "install", *target, ".", timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/headstart/py.typed").exists()
    assert (tmp_path / "site/headstart/demo/document.txt").exists()


def test_bench_storage(tmp_path):
    small = ("--total", "8MiB", "--rounds", "6", "--blocks", "20000", "--json", "-")
    done = run("headstart", "bench", "storage", *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "headstart.bench.storage/1"
    assert [result["block_nbytes"] >> 10 for result in document["results"]] == [
        *(128, 512, 1024, 2048, 4096)
    ]
    for result in document["results"]:
        assert result["verified"] is True
        assert result["share_low"] <= result["share_of_raw"] <= result["share_high"]
        # Very wide: only a collapse, such as one read at a time behind a lock, is caught here.
        assert result["share_of_raw"] > 0.1
    assert document["reopen"]["num_blocks"] >= 20000
    assert document["reopen"]["index_bytes_per_block"] < 200
    assert document["lookup"]["p99_s"] < 0.1
    assert not list((tmp_path / "build/bench").iterdir()), "the benchmark left something behind"


@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_make_demo(tmp_path):
    done = run("make", "demo", timeout_s=1400)
    assert done.returncode == 0, done.stderr
    document = json.loads((ROOT / "build/demo.json").read_text(encoding="utf-8"))
    assert document["schema"] == "headstart.demo/1"
    assert document["identical"] is True
    phases = {phase["name"]: phase for phase in document["phases"]}
    assert list(phases) == ["recompute", "cold", "memory", "restart"]
    assert all(phase["prompt_tokens"] >= 5500 for phase in phases.values())
    assert phases["recompute"]["hit_tokens"] == phases["cold"]["hit_tokens"] == 0
    for name in ("memory", "restart"):
        # All but the last token, or but the tail that is shorter than a block.
        assert phases[name]["hit_tokens"] > phases[name]["prompt_tokens"] - 33
    assert document["speedup_restart"] > 5  # the aim is 10; this machine may be busy
    page = (ROOT / "build/demo.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "<script" not in page
