"""`headstart tune --sample`: what it prints, writes and refuses."""

from __future__ import annotations

import json

import pytest

from headstart.cli.main import main
from trace_cases import lines
from tuner_cases import SIZE, many_chats

WORDS = ("--trace-block-size", SIZE, "--capacities", 150 * SIZE)


@pytest.fixture
def run(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines(many_chats(0, 200)))

    def call(*args):
        with pytest.raises(SystemExit) as end:
            main(["tune", str(path), *map(str, (*WORDS, *args))])
        return end.value.code or 0, capsys.readouterr()

    return call


def test_a_sample_says_how_far_off_it_is(run, tmp_path):
    target = tmp_path / "found.json"
    code, printed = run("--sample", "50%", "--policies", "lru,fifo", "--json", target)
    assert code == 0
    assert "A sample: " in printed.out
    assert "8 disjoint parts" in printed.out
    assert "a sample of the sessions: " in printed.out
    assert printed.out.count(" ± ") == 6
    document = json.loads(target.read_text())
    assert 0.3 < document["sample"]["share"] < 0.7
    assert document["sample"]["sessions"] > 60
    assert len(document["sample"]["curve"]) == len(document["curve"]) == 2
    whole = json.loads(run("--policies", "lru,fifo", "--json", "-")[1].out)
    assert "sample" not in whole
    for some, all_, error in zip(
        document["curve"], whole["curve"], document["sample"]["curve"], strict=True
    ):
        off = abs(some["token_hit"] - all_["token_hit"])
        assert off < 2 * error["token_hit_error"]


def test_the_whole_trace_is_no_sample(run):
    code, printed = run("--sample", "100%")
    assert (code, " ± " in printed.out) == (0, False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sample", "most"), "--sample 'most' is no share; write 25% or 0.25"),
        (("--sample", "150%"), "--sample '150%' is no share"),
        (("--sample", "0"), "a share of the sessions is above 0 and at most 1, not 0.0"),
        (("--sample", "1e-9"), "no session is left of a share of 1e-09; take more"),
        (("--sample", "5%"), "sessions cannot tell how far off it is; take a larger share"),
    ],
)
def test_wrong_usage_ends_with_2(run, words, message):
    code, printed = run(*words)
    assert code == 2
    assert message in printed.err
