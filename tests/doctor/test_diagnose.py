"""Confidence, order, the split and what is missing."""

from __future__ import annotations

import pytest

from headstart.doctor.diagnose import diagnose
from headstart.doctor.facts import Evidence, Fact, Known, Source
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.doctor.fixes import choose
from headstart.doctor.readers import Document
from headstart.doctor.readers.observations import ObservationsReader
from headstart.doctor.split import splits


def known(text):
    return Known(ObservationsReader().read([Document(path="x.toml", text=text)]).facts)


def rule(cause, **sign):
    told = {
        "strength": Strength.SEEN,
        "margin": 2.0,
        "evidence": (Evidence(text=str(cause), sources=()),),
    }
    made = Sign(**(told | sign))
    return Rule(name=str(cause), cause=cause, needs=(), find=lambda known: iter((made,)))


def said(*rules, text="ttft_p50 = 10"):
    return diagnose(known(text), rules=rules)


def test_confidence_grows_with_the_margin():
    confidences = [
        said(rule(Cause.NO_ROOM, margin=margin)).findings[0].confidence
        for margin in (1.0, 1.2, 1.5, 9.0)
    ]
    assert confidences == sorted(confidences)
    assert confidences[0] == pytest.approx(0.95 * 0.7)
    assert confidences[2] == confidences[3] == pytest.approx(0.95)


def test_a_hint_at_its_threshold_is_not_said():
    diagnosis = said(rule(Cause.NO_ROOM, strength=Strength.HINTED, margin=1.0))
    assert diagnosis.verdict == Cause.CANNOT_SAY


def test_what_explains_more_comes_first():
    diagnosis = said(
        rule(Cause.NO_ROOM, explained_s=2.0),
        rule(Cause.SLOW_TIER, explained_s=7.0),
        rule(Cause.LOOKUP_CPU, explained_s=0.5),
    )
    # 0.5 of 10 s is less than a tenth.
    assert [each.cause for each in diagnosis.findings] == [Cause.SLOW_TIER, Cause.NO_ROOM]


def test_why_comes_before_where():
    diagnosis = said(
        rule(Cause.SLOW_TIER, explained_s=7.0, is_symptom=True),
        rule(Cause.IO_PARALLELISM, explained_s=6.0),
    )
    assert diagnosis.verdict == Cause.IO_PARALLELISM


def test_wrong_figures_and_wrong_answers_come_before_all():
    diagnosis = said(
        rule(Cause.SLOW_TIER, explained_s=9.0),
        rule(Cause.CORRECTNESS),
        rule(Cause.MEASUREMENT, strength=Strength.COMPARED),
    )
    causes = [each.cause for each in diagnosis.findings]
    assert causes == [Cause.MEASUREMENT, Cause.CORRECTNESS, Cause.SLOW_TIER]


def test_two_rules_of_one_cause_are_one_finding():
    other = rule(Cause.NO_ROOM, strength=Strength.COMPUTED, explained_s=5.0)
    (finding,) = said(rule(Cause.NO_ROOM), other).findings
    assert finding.confidence == 0.95
    assert finding.explained_s == 5.0


def test_the_split_adds_up():
    text = 'ttft_p50 = 2\nqueue = 0.5\nlookup = "100 ms"\nload = 0.7\nprefill = 0.4\n'
    (split,) = splits(known(text))
    assert sum(stage.seconds for stage in split.stages) == pytest.approx(split.ttft_s)
    assert split.stages[-1].name == "rest"
    assert split.stages[-1].seconds == pytest.approx(0.3)


def test_stages_are_computed_where_they_were_not_measured():
    text = (
        'kv_bytes_per_token = "100 kB"\nprompt_tokens = 10000\nprefill_rate = 2000\n'
        '[[arms]]\nname = "hit"\ncache = "warm"\nhit_rate = 0.8\nttft_p50 = 3\n'
        '[[tiers]]\nname = "t"\nbandwidth = "0.8 GB/s"\n'
    )
    (split,) = splits(known(text))
    stages = {stage.name: stage for stage in split.stages}
    assert stages["load"].seconds == pytest.approx(1.0)
    assert stages["prefill"].seconds == pytest.approx(1.0)
    assert not stages["load"].is_measured


def test_what_no_stage_accounts_for_is_said():
    diagnosis = diagnose(known("ttft_p50 = 5\nqueue = 0.2\nprefill = 0.3\n"))
    assert diagnosis.verdict == Cause.CANNOT_SAY
    assert "4.5 s" in diagnosis.notes[0]


def test_missing_names_what_completes_a_rule():
    diagnosis = diagnose(known("pool_tokens = 5000\nsessions = 10\nttft_p50 = 1\n"))
    assert any(line.startswith("arms.session_tokens:") for line in diagnosis.missing)


def test_with_nothing_told_it_asks_for_the_first_things():
    diagnosis = diagnose(Known(()))
    assert diagnosis.verdict == Cause.CANNOT_SAY
    assert diagnosis.missing[0].startswith("arms.ttft_p50")


FIXES = (
    Fix(text="old", engine="vllm", before="0.9"),
    Fix(text="new", engine="vllm", since="0.9"),
    Fix(text="other", engine="sglang"),
    Fix(text="any"),
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('engine = "vllm"\nengine_version = "0.8.5"', ["vLLM: old (before 0.9)", "any"]),
        ('engine = "vllm"\nengine_version = "v0.27.1rc0"', ["vLLM: new (from 0.9)", "any"]),
        ('engine = "SGLang"', ["SGLang: other", "any"]),
        ('engine = "own"', ["any"]),
    ],
)
def test_fixes_are_those_of_the_engine_and_version(text, expected):
    assert list(choose(known(text), FIXES)) == expected


def test_without_an_engine_every_engines_fix_is_given_with_its_name():
    assert len(choose(known("ttft_p50 = 1"), FIXES)) == 4


def test_evidence_names_file_and_line():
    diagnosis = diagnose(known('evict = "7 ms"\nevictions_per_request = 500\n'))
    assert str(diagnosis.findings[0].evidence[0]).endswith("(x.toml:1, x.toml:2)")


def test_a_fact_of_an_unknown_key_cannot_exist():
    with pytest.raises(ValueError, match="no key of tiers"):
        Fact(key="ttft_p50", value=1.0, source=Source(path="x"), scope="tiers")
