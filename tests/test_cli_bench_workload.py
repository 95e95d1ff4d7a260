"""`headstart bench workload`: what is shown, what is written, and that it can be read again."""

from __future__ import annotations

import json

import pytest

from headstart.cli.main import main


def ended(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(["bench", "workload", *args])
    return end.value.code or 0, capsys.readouterr()


LOAD = ("--sessions", "5", "--turns", "2", "--shared-tokens", "64", "--own-tokens", "20")


def test_a_load_is_shown_and_comes_back(capsys, tmp_path):
    path, first, second = (tmp_path / name for name in ("load.jsonl", "1.json", "2.json"))
    words = ("--block-size", "32", "--rate", "2", "--think", "3")
    code, printed = ended(capsys, *LOAD, *words, "--jsonl", str(path))
    assert (code, "hits that are possible" in printed.out) == (0, True)
    ended(capsys, *LOAD, *words, "--json", str(first))
    again = ("--workload", "trace", "--trace", str(path), "--trace-block-size", "32")
    code, _ = ended(capsys, *again, "--block-size", "32", "--json", str(second))
    assert code == 0
    made, read = (json.loads(each.read_text()) for each in (first, second))
    assert made["schema"] == "headstart.bench.workload/1"
    for field in ("requests", "prompt_tokens", "output_tokens", "simulated_hit_rate"):
        assert read[field] == made[field] > 0
    assert (made["sessions"], made["requests"]) == (5, 10)
    assert read["span_s"] == pytest.approx(made["span_s"], abs=1e-3)
    times = [json.loads(line)["timestamp"] for line in path.read_text().splitlines()]
    assert times == sorted(times)
    assert times[-1] > 3000, "the pause between turns is there"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workload", "ragg"), "known: shared-prefix, multi-turn, rag, unique, trace, agentic"),
        (("--workload", "agentic"), "--workload agentic needs a file"),
        (("--jsonl", "/proc/none/x"), "cannot be written"),
        (("--json", "/proc/none/x"), "cannot be written"),
        (("--workload", "trace", "--trace", "x", "--scale-tokens", "2"), "at most 1"),
    ],
)
def test_wrong_usage_ends_with_2(capsys, words, message):
    code, printed = ended(capsys, *words)
    assert code == 2
    assert message in printed.err
