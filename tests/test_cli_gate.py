"""`headstart gate`: exit codes, several files after an option, and what is said."""

from __future__ import annotations

import json

import msgspec
import pytest

from headstart.bench.run import Request, Run
from headstart.cli.gate import spread
from headstart.cli.main import main


def write(folder, name, median_s, duration_s=10.0):
    """A run of ten requests that all take the same."""
    folder.mkdir(exist_ok=True)
    requests = tuple(
        Request(
            session=str(n),
            prompt_tokens=100,
            output_tokens=2,
            ttft_s=median_s * (1 + n / 100),
            latency_s=median_s + 1.0,
        )
        for n in range(10)
    )
    path = folder / f"{name}.json"
    run = Run(tool="headstart", duration_s=duration_s, requests=requests)
    path.write_bytes(msgspec.json.encode(run))
    return str(path)


@pytest.fixture
def files(tmp_path):
    slow = [write(tmp_path / "a", f"{n}", 1.0 + n / 1000) for n in range(3)]
    fast = [write(tmp_path / "b", f"{n}", 0.5 + n / 1000, 7.0) for n in range(3)]
    return slow, fast


def ended(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(["gate", *args])
    return end.value.code, capsys.readouterr()


def test_the_exit_code_is_the_verdict(files, capsys):
    slow, fast = files
    asked = ("--slo", "ttft=2s")
    code, printed = ended(capsys, "--baseline", *slow, "--candidate", *fast, *asked)
    assert (code, "PASS" in printed.out) == (0, True)
    code, _ = ended(capsys, "--baseline", *fast, "--candidate", *slow, *asked)
    assert code == 1
    code, printed = ended(capsys, "--baseline", *slow, "--candidate", *fast)
    assert (code, "INCONCLUSIVE" in printed.out) == (2, True)


def test_a_preset_is_said_to_be_no_more_than_that(files, capsys):
    slow, fast = files
    preset = ("--slo", "mlperf-llama2-70b-server")
    _, printed = ended(capsys, "--baseline", *slow, "--candidate", *fast, *preset)
    assert "not MLPerf" in printed.out


def test_json_is_all_that_stdout_gets(files, capsys):
    slow, fast = files
    words = ("--throughput-gain", "0", "--json", "-")
    code, printed = ended(capsys, "--baseline", *slow, "--candidate", *fast, *words)
    told = json.loads(printed.out)
    assert (code, told["verdict"], told["pairs"]) == (0, "PASS", 3)
    assert told["ttft_p50_ratio"]["upper95"] < 0.6
    assert told["throughput_ratio"]["estimate"] == pytest.approx(10 / 7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Missing option"),
        (("--ttft-drop", "much"), "--ttft-drop 'much' is no share"),
        (("--ttft-drop", "120%"), "is no share"),
        (("--slo", "tfft=2s"), "--slo 'tfft=2s' is unknown; write one of ttft, tpot, latency"),
        (("--slo", "ttft=2 moons"), "unit 'moons'"),
        (("--bogus",), "No such option"),
        (("--json", "/proc/none/x"), "cannot be written"),
    ],
)
def test_wrong_usage_ends_with_3(files, capsys, words, message):
    slow, fast = files
    arms = ("--baseline", *slow, "--candidate", *fast) if words else ("--baseline", *slow)
    code, printed = ended(capsys, *arms, *words)
    assert code == 3
    assert message in printed.err


def test_what_cannot_be_compared_ends_with_3(files, capsys, tmp_path):
    slow, fast = files
    code, printed = ended(capsys, "--baseline", slow[0], "--candidate", fast[0])
    assert (code, "5 are advised" in printed.err) == (3, True)
    code, printed = ended(capsys, "--baseline", *slow, "--candidate", str(tmp_path / "none"))
    assert (code, "cannot be read" in printed.err) == (3, True)


def test_files_after_an_option_are_its_own():
    words = ["--baseline", "a", "b", "--candidate", "c", "d", "--json", "-", "--candidate", "e"]
    assert spread(words) == [
        *("--baseline", "a", "--baseline", "b", "--candidate", "c", "--candidate", "d"),
        *("--json", "-", "--candidate", "e"),
    ]
    assert spread(["--json", "x", "y"]) == ["--json", "x", "y"]
