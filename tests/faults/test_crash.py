"""`kill -9` at random moments: no wrong block, and all that was flushed is there."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from headstart.testing import aligned_buffers
from headstart.tiers import FileTier, write

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "crash.py"


def run(num_kills, tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--kills", str(num_kills), "--folder", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert report["schema"] == "headstart.bench.crash/1"
    assert (done.returncode == 0) == report["good"]
    return report, done.stderr


def check(num_kills, tmp_path):
    report, explanation = run(num_kills, tmp_path)
    assert report["failures"] == [], explanation
    assert (report["wrong_blocks"], report["lost_blocks"], report["holes"]) == (0, 0, 0), (
        explanation
    )
    assert report["kills"] == num_kills
    assert report["blocks_read"] > num_kills, "hardly anything was written before the kills"
    assert report["chains_interrupted"] > 0, "no kill came during a write"


def test_twenty_kills(tmp_path):
    check(20, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("repetition", range(5))
def test_two_hundred_kills(tmp_path, repetition):
    check(200, tmp_path)


# --------------------------------------------------------------- what looks for harm can find it


@pytest.fixture(scope="module")
def crash():
    spec = spec_from_file_location("headstart_crash", SCRIPT)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def life(crash, tmp_path):
    """A directory with chains 0 to 9, all acknowledged."""
    life = crash.Life(tmp_path / "life", tight=False, threads=False)
    tier = FileTier(life.options())
    tier.open_namespace(crash.NAMESPACE)
    for number in range(10):
        chain = crash.chain_of(number)
        sources = aligned_buffers(len(chain), crash.BLOCK_NBYTES)
        for index, source in enumerate(sources):
            source[: crash.BLOCK_NBYTES] = crash.content_of(chain, index)
        write(tier, chain, sources)
    tier.close()
    return life


def inspected(crash, life):
    report = crash.Report()
    crash.inspect(life, list(range(10)), list(range(10)), report)
    return report


def test_nothing_is_found_where_nothing_is(crash, life):
    report = inspected(crash, life)
    assert report.good
    assert report.blocks_read == sum(len(crash.chain_of(number)) for number in range(10))


def harm(life, offset, data):
    with open(life.root / "slabs" / "000000.slab", "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_lost_block_is_found(crash, life):
    harm(life, 5000, b"\xff" * 8)
    report = inspected(crash, life)
    assert (report.damaged_blocks, report.wrong_blocks, report.good) == (1, 0, False)
    assert report.lost_blocks >= 1


def test_a_wrong_block_is_found(crash, life, monkeypatch):
    monkeypatch.setattr("headstart.tiers.filebatch.inspect_block", lambda *_, **__: None)
    harm(life, 5000, b"\xff" * 8)
    report = inspected(crash, life)
    assert report.wrong_blocks >= 1
    assert not report.good


def test_a_writer_that_does_not_run_is_found(crash, tmp_path, monkeypatch):
    monkeypatch.setattr(crash, "run_and_kill", lambda *_, **__: [])
    report = crash.crash(20, 0, tmp_path)
    assert report.failures
    assert not report.good
