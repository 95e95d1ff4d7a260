"""The observations file: units, lines, and what is refused."""

from __future__ import annotations

import pytest

from headstart.doctor.facts import Known
from headstart.doctor.readers import READERS, Document, load
from headstart.doctor.readers.observations import ObservationsReader
from headstart.errors import ConfigError


def facts(text, path="x.toml"):
    return ObservationsReader().read([Document(path=path, text=text)]).facts


def value(text, key):
    return next(fact.value for fact in facts(text) if fact.key == key)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('ttft_p50 = "250 ms"', 0.25),
        ('ttft_p50 = "2.3us"', 2.3e-6),
        ("ttft_p50 = 12", 12.0),
        ('kv_bytes_per_token = "145 kB"', 145_000),
        ('kv_bytes_per_token = "128KiB"', 131_072),
        ('link_bandwidth = "1.25 GB/s"', 1.25e9),
        ('link_bandwidth = "200 Gbit/s"', 25e9),
        ('link_bandwidth = "24 GiB/s"', 24 * 2**30),
        ("hit_rate = 0.665", 0.665),
        ('hit_rate = "66.5 %"', 0.665),
        ('model_params = "70 G"', 70e9),
        ("num_preemptions = 101", 101),
        ('prefill_rate = "9000 tok/s"', 9000),
        ('prefill_rate = "9 k tokens/s"', 9000),
        ('prompt_tokens = "32k tokens"', 32_000),
        ('requests_per_s = "3 req/s"', 3),
        ('requests_per_s = "3/s"', 3),
        ('device_flops = "989 TFLOP/s"', 989e12),
        ("pinned = false", False),
        ("group_block_sizes = [16, 32]", (16.0, 32.0)),
        ('access = "cyclic"', "cyclic"),
    ],
)
def test_units(line, expected):
    key = line.partition(" ")[0]
    assert value(line, key) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('ttft_p50 = "3 parsecs"', "ttft_p50.*unit 'parsecs'"),
        ("ttft_p50 = -1", "ttft_p50.*at least 0"),
        ("ttft_p50 = nan", "ttft_p50.*no number"),
        ("ttft_p50 = true", "ttft_p50.*no number"),
        ('prefill_rate = "9 GB/s"', "unit 'GB/s'.*tokens/s behind it"),
        ('num_preemptions = "3 tokens"', "unit 'tokens'; a plain number, or one with k, M, G$"),
        ("hit_rate = 66.5", 'hit_rate.*above 1; write 0.665 or "66.5 %"'),
        ('link_bandwidth = "3 GB"', "no rate"),
        ('link_bandwidth = "3 Xbit/s"', "Gbit/s"),
        ('access = "round"', "access.*cyclic"),
        ("pinned = 3", "pinned"),
        ("tftt_p50 = 1", "tftt_p50 is unknown; did you mean 'ttft_p50'.*all keys are in"),
        ("bandwidth = 1", r"bandwidth is unknown.*a key of \[\[tiers\]\]"),
        ('[[arms]]\nname="a"\ncache="of"', "arms.0.cache"),
        ('[[arms]]\nname="a"', "arms.0.cache is missing"),
        ('[[arms]]\nname="a"\ncache="on"\nhitrate=0.1', "did you mean 'hit_rate'"),
        ('[[tiers]]\nname="a"\nband_width=1', "did you mean 'bandwidth'"),
        ('[[tiers]]\nname="a"\n[[tiers]]\nname="a"', "two of tiers have the name 'a'"),
        ("ttft_p50 = ", "is not TOML"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(line, message):
    with pytest.raises(ConfigError, match=message):
        facts(line)


def test_every_fact_has_its_line():
    text = (
        '# a comment\nengine = "vllm"\n\n[[arms]]  # one\nname = "a"\ncache = "off"\n'
        'ttft_p50 = 1\n\n[[arms]]\nname = "b"\ncache = "warm"\nttft_p50 = 2\n'
    )
    lines = {(fact.owner, fact.key): fact.source.line for fact in facts(text)}
    assert lines["", "engine"] == 2
    assert lines["a", "ttft_p50"] == 7
    assert lines["b", "cache"] == 11
    assert lines["b", "ttft_p50"] == 12


def test_what_holds_for_all_is_asked_of_an_arm():
    known = Known(
        facts(
            'concurrency = 4\n[[arms]]\nname = "a"\ncache = "off"\n'
            '[[arms]]\nname = "b"\ncache = "on"\nconcurrency = 8\n'
        )
    )
    assert [arm.number("concurrency") for arm in known.arms] == [4, 8]


def test_what_an_arm_says_itself_comes_before_what_holds_for_all():
    known = Known(facts('ttft_p50 = 1\n[[arms]]\nname = "a"\ncache = "on"\nttft_mean = 9\n'))
    assert known.arms[0].number("ttft") == 9
    assert known.top.number("ttft") == 1


def test_a_rule_that_asks_for_an_unknown_key_is_a_bug():
    with pytest.raises(KeyError):
        Known(()).top.number("ttft_p51")


def test_of_two_files_the_first_counts(tmp_path):
    one, two = tmp_path / "1.toml", tmp_path / "2.toml"
    one.write_text("ttft_p50 = 1\n")
    two.write_text("ttft_p50 = 2\nhit_rate = 0.5\n")
    known = Known(load([one, two], READERS).facts)
    assert known.top.number("ttft_p50") == 1
    assert known.top.number("hit_rate") == 0.5


def test_a_file_of_no_known_kind_is_reported_not_fatal(tmp_path):
    path = tmp_path / "notes.md"
    path.write_text("# the server was slow\n")
    report = load([path], READERS)
    assert report.facts == ()
    assert "notes.md" in report.skipped[0]


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load([tmp_path / "none.toml"], READERS)


def test_it_is_known_by_its_content_too():
    knows = ObservationsReader().knows
    assert knows(Document(path="obs.txt", text="# x\nttft_p50 = 1\n"))
    assert knows(Document(path="obs.txt", text="[[arms]]\n"))
    assert not knows(Document(path="log.txt", text="INFO x = 1\n"))
