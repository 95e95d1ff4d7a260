"""`headstart tune` with two tiers: what is printed, written and refused."""

from __future__ import annotations

import json

import pytest

from headstart.cli.main import main
from headstart.tuner.curve import depths, lru_curve
from headstart.tuner.tiers import simulate_tiers
from trace_cases import lines
from tuner_cases import chats, recorded


def ended(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(list(map(str, args)))
    return end.value.code or 0, capsys.readouterr()


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "load.jsonl"
    path.write_bytes(lines(chats(7)))
    return path


SIZE = ("--trace-block-size", "4")
TIERS = (*SIZE, "--memory-tokens", "80", "--file-tokens", "120,4_000")
WRITES = ("--write", "through,on-evict,second-touch")


def points(capsys, *args):
    code, printed = ended(capsys, "tune", *args, "--json", "-")
    assert code == 0, printed.err
    return json.loads(printed.out)["tiers"]


def test_every_setup_is_replayed(capsys, trace, tmp_path):
    found = points(capsys, trace, *TIERS, *WRITES)
    assert [(each["file_tokens"], each["write"]) for each in found] == [
        (files, write) for files in (120, 4000) for write in WRITES[1].split(",")
    ]
    same = recorded(tmp_path, chats(7))
    curve = lru_curve(same, depths(same))
    for each in found:
        assert each["memory_tokens"] == 80
        assert each["token_hit_memory"] == pytest.approx(curve.at(20).token_hit)
        assert each["written_blocks"] == sum(each["written_blocks_by_cause"].values())
        assert each["written_nbytes"] is each["endurance_used"] is None, "no --token-kv"
        if each["write"] == "through":
            assert each["token_hit"] == pytest.approx(curve.at(each["file_tokens"] // 4).token_hit)
    assert 0 < found[5]["written_blocks"] < found[3]["written_blocks"]


def test_setups_that_are_done_stay_after_ctrl_c(capsys, trace, monkeypatch):
    def interrupted(recorded, setup, *args):
        if setup.write == "second-touch":
            raise KeyboardInterrupt
        return simulate_tiers(recorded, setup, *args)

    monkeypatch.setattr("headstart.tuner.tier_report.simulate_tiers", interrupted)
    code, printed = ended(capsys, "tune", trace, *TIERS, *WRITES, "--json", "-")
    document = json.loads(printed.out)
    assert (code, document["interrupted"]) == (130, True)
    assert [each["write"] for each in document["tiers"]] == ["through", "on-evict"]
    assert document["curve"]


def test_the_ssd_is_weighed(capsys, trace):
    asked = (trace, *TIERS, "--token-kv", "128KiB")
    for rating, budget in (
        ("1dwpd", 30 * (4 * 128 + 4) * 1024),  # 30 blocks of the file tier, with their headers
        ("2dwpd:1GB", 2e9),
        ("365TBW:1y", 1e12),
    ):
        found = points(capsys, *asked, "--endurance", rating)[0]
        # 120 requests, 10 ms apart.
        expected = found["written_blocks"] * (4 * 128 + 4) * 1024 / 1.19 * 86_400
        assert found["written_nbytes_a_day"] == pytest.approx(expected)
        assert found["endurance_nbytes_a_day"] == pytest.approx(budget)
        assert found["endurance_used"] == pytest.approx(expected / budget)
    assert found["read_nbytes_a_day"] > 0 < found["read_nbytes"]


def test_the_table(capsys, trace):
    code, printed = ended(capsys, "tune", trace, *TIERS, *WRITES)
    assert code == 0
    for text in ("Tiers; shares", "second-touch", "4,000", "new 100%; 0% again", "tokens"):
        assert text in printed.out
    assert "a day" not in printed.out
    words = ("--token-kv", "128KiB", "--endurance", "600TBW:5y")
    _, printed = ended(capsys, "tune", trace, *TIERS, *words)
    for text in ("a day", "of 600TBW:5y", "MiB", " times"):
        assert text in printed.out


def test_a_trace_of_one_moment_has_no_day(capsys, tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_bytes(lines(chats(7)[:1]))
    words = ("--token-kv", "1KiB", "--endurance", "1dwpd")
    found = points(capsys, path, *TIERS, *words)
    assert found[0]["written_blocks"] > 0
    assert found[0]["written_nbytes_a_day"] is found[0]["endurance_used"] is None
    _, printed = ended(capsys, "tune", path, *TIERS, *words)
    assert "unknown" in printed.out


def test_more_options_reach_the_replay(capsys, trace):
    plain = points(capsys, trace, *TIERS)[0]
    assert (plain["engines"], plain["ttl_s"], plain["policy"]) == (1, None, "lru")
    words = ("--engines", "2", "--ttl", "50ms", "--tier-policy", "fifo")
    found = points(capsys, trace, *TIERS, *words)[0]
    assert (found["engines"], found["ttl_s"], found["policy"]) == (2, 0.05, "fifo")
    assert found["token_hit"] < plain["token_hit"]
    assert points(capsys, trace, *TIERS, "--tier-policy", "cost=4")[0]["policy"] == "cost=4"
    small = (*SIZE, "--memory-tokens", "40", "--file-tokens", "40", "--write", "on-evict")
    alone, both = points(capsys, trace, *small)[0], points(capsys, trace, *small, "--exclusive")[0]
    assert (alone["inclusive"], both["inclusive"]) == (True, False)
    assert both["token_hit"] > alone["token_hit"], "capacities add up"


def test_without_tiers_there_are_none(capsys, trace):
    _, printed = ended(capsys, "tune", trace, *SIZE, "--json", "-")
    assert "tiers" not in json.loads(printed.out)
    _, printed = ended(capsys, "tune", trace, *SIZE)
    assert "Tiers" not in printed.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--memory-tokens", "80"), "need both --memory-tokens and --file-tokens; 0 is none"),
        (("--engines", "2"), "do nothing without --memory-tokens and --file-tokens"),
        ((*TIERS, "--write", "back"), "'back' is unknown; known: through, on-evict, second-touch"),
        ((*TIERS, "--exclusive"), "exclusive tiers are written on-evict"),
        ((*TIERS, "--tier-policy", "lfu"), "'lfu' is unknown; allowed: lru, fifo"),
        ((*TIERS, "--engines", "0"), "0 engines cannot be simulated; 1 to 256 can"),
        ((*TIERS, "--ttl", "soon"), "'soon' is not a quantity"),
        ((*TIERS, "--ttl", "0s"), "a TTL is above 0 s"),
        ((*TIERS, "--endurance", "1dwpd"), "it needs --token-kv, such as 128KiB"),
        ((*TIERS, "--endurance", "600TBW"), "is no rating above 0; write 1dwpd"),
        ((*TIERS, "--sample", "50%"), "two tiers are not replayed from a sample"),
        ((*TIERS[:4], "--file-tokens", "1TB"), "--file-tokens '1TB' are no numbers of tokens"),
        ((*SIZE, "--memory-tokens", "-1", "--file-tokens", "0"), "--memory-tokens '-1' are no"),
        ((*TIERS[:4], "--file-tokens", "3"), "less than one block of 4 tokens; 0 is no tier"),
        ((*TIERS[:4], "--file-tokens", ",".join(map(str, range(65)))), "65 setups of tiers would"),
    ],
)
def test_wrong_usage_ends_with_2(capsys, trace, words, message):
    code, printed = ended(capsys, "tune", trace, *words)
    assert code == 2
    assert message in " ".join(printed.err.split())
