"""What processes used, from /proc, and what a server's metrics say of its hits."""

import contextlib
import os
import subprocess
import sys
import time

import pytest

from headstart.bench.counters import (
    cpu_s,
    family,
    forget_peaks,
    hits_by_tier,
    loaded_tokens,
    peak_memory_nbytes,
    read_nbytes,
)
from headstart.bench.run import Request
from node_process import wait_for

MIB = 1 << 20


@contextlib.contextmanager
def running(code):
    """A program that is told a line at a time; it says one when it has done what it was told."""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def tell(line="go on"):
            process.stdin.write(line + "\n")
            process.stdin.flush()
            assert process.stdout.readline()

        try:
            yield process, tell
        finally:
            process.kill()


def test_a_family_is_a_process_and_all_below_it():
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True)"
    with running(f"{code}; input(); p.kill(); p.wait(); print('ok', flush=True); input()") as (
        process,
        tell,
    ):
        child = int(process.stdout.readline())
        assert sorted(family([process.pid])) == sorted([process.pid, child])
        assert child in family([os.getpid()])
        tell()
        assert family([process.pid]) == [process.pid]
    wait_for(lambda: family([process.pid]) == [], "the end")


SPIN = """
import subprocess, sys, time
def spin():
    end = time.process_time() + 0.3
    while time.process_time() < end: pass
input(); spin(); print(1, flush=True)
code = "import time\\nwhile time.process_time() < 0.3: pass"
input(); subprocess.run([sys.executable, "-c", code])
print(2, flush=True); input()
"""


def test_computing_counts_that_of_ended_children_too():
    with running(SPIN) as (process, tell):
        start = cpu_s(family([process.pid]))
        tell()
        alone = cpu_s(family([process.pid]))
        assert 0.25 <= alone - start < 2.0
        tell()
        assert 0.25 <= cpu_s(family([process.pid])) - alone < 2.0


HOLD = """
import mmap, os
input(); block = b"x" * (64 << 20); del block; print(1, flush=True)
input(); shared = mmap.mmap(-1, 64 << 20); shared.write(b"x" * (64 << 20)); pid = os.fork()
if pid == 0:
    sum(shared[::4096]); print(2, flush=True); import time; time.sleep(60)
input()
"""


def test_a_peak_is_since_it_was_forgotten_and_shared_memory_counts_once():
    with running(HOLD) as (process, tell):
        pids = [process.pid]
        small = peak_memory_nbytes(pids)
        tell()
        assert 60 * MIB < peak_memory_nbytes(pids) - small < 80 * MIB
        assert forget_peaks(pids)
        assert peak_memory_nbytes(pids) < small + 20 * MIB
        assert forget_peaks(pids)
        tell()
        pids = family([process.pid])
        assert len(pids) == 2
        # What was written comes from a copy of the same size, which is part of the peak.
        assert 120 * MIB < peak_memory_nbytes(pids) - small < 160 * MIB
        os.kill(max(set(pids) - {process.pid}), 9)


def test_only_what_devices_gave_is_read(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(os.urandom(4 * MIB))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        before = read_nbytes([os.getpid()])
        file.read()
        assert read_nbytes([os.getpid()]) == before, "it was in the page cache"
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        file.read()
        grown = read_nbytes([os.getpid()]) - before
    # Not every file system has a device behind it.
    assert grown == 0 or grown >= 4 * MIB


def test_what_has_ended_counts_nothing():
    process = subprocess.Popen(["true"])
    process.wait()
    gone = [process.pid]
    assert (family(gone), cpu_s(gone), read_nbytes(gone), peak_memory_nbytes(gone)) == ([], 0, 0, 0)
    assert not forget_peaks(gone)


PAGE = """# TYPE headstart:hits counter
headstart:hits_total{engine="0"} 2.0
# TYPE headstart:loaded_tokens counter
headstart:loaded_tokens_total{engine="0",tier="memory"} 256.0
headstart:loaded_tokens_total{engine="0",tier="file"} 128.0
headstart:loaded_tokens_total{engine="1",tier="file"} 64.0
headstart:loaded_tokens_created{engine="0",tier="file"} 1.7e9
"""


def test_tokens_are_summed_by_tier():
    assert loaded_tokens(PAGE) == {"memory": 256, "file": 192}
    assert loaded_tokens(PAGE.splitlines()[0] + "\nheadstart:hits_total 0\n") == {}
    for page in (None, "", "vllm:x_total 1\n", "<html>", 'headstart:loaded_tokens_total{a="b"} 1'):
        assert loaded_tokens(page) is None


def asked(cached, **known):
    return Request(
        session="", prompt_tokens=100, output_tokens=1, ttft_s=1.0, cached_tokens=cached, **known
    )


def test_what_was_not_loaded_was_the_engines_own():
    requests = [asked(60), asked(40)]
    told = hits_by_tier(requests, {"file": 10}, {"file": 40, "memory": 50})
    assert told == {"engine": 20, "file": 30, "memory": 50}
    assert hits_by_tier(requests, {}, {}) == {"engine": 100}


@pytest.mark.parametrize(
    ("requests", "before", "after"),
    [
        ([asked(60)], None, {}),
        ([asked(60)], {}, None),
        ([asked(None)], {}, {}),
        ([asked(60), asked(0, error="503")], {}, {}),
        ([asked(60)], {}, {"file": 61}),
        ([asked(60)], {"file": 5}, {"file": 4}),
    ],
)
def test_what_cannot_be_known_is_not_told(requests, before, after):
    assert hits_by_tier(requests, before, after) is None


def test_nothing_waits_for_a_process_that_spins():
    """The counters are read while it runs."""
    with running("print(1, flush=True)\nwhile True: pass") as (process, _):
        process.stdout.readline()
        first = cpu_s([process.pid])
        time.sleep(0.2)
        assert cpu_s([process.pid]) > first
