"""Verdicts on cases from public reports, on healthy controls, and with every figure jittered."""

from __future__ import annotations

import pytest

import doctor_docs
from headstart.doctor.diagnose import diagnose
from headstart.doctor.facts import Known
from headstart.doctor.findings import Cause
from headstart.doctor.rules import RULES

CASES = doctor_docs.cases()
HELD_OUT = doctor_docs.cases(doctor_docs.HELD_OUT)
BLIND = doctor_docs.cases(doctor_docs.BLIND)


def ids(case):
    return case.name


def test_nine_in_ten_are_right():
    judged = doctor_docs.judged()
    right = sum(said.verdict == case.expected for case, said in judged)
    assert right >= 0.9 * len(judged)
    for cause in Cause:
        of_cause = [said.verdict for case, said in judged if case.expected == cause]
        assert len(of_cause) >= 3, f"too few cases of {cause} to say anything"
        assert sum(said == cause for said in of_cause) >= 0.75 * len(of_cause)


def test_there_are_enough_cases():
    assert sum(not case.is_made for case in CASES) >= 60
    assert sum(case.is_made and case.is_control for case in CASES) >= 10


@pytest.mark.parametrize("case", [each for each in CASES if each.is_control], ids=ids)
def test_a_control_is_not_accused(case):
    said = diagnose(Known(case.facts))
    assert said.findings == ()
    assert said.verdict == case.expected


@pytest.mark.parametrize("case", HELD_OUT, ids=ids)
def test_cases_that_were_written_last(case):
    assert diagnose(Known(case.facts)).verdict == case.expected


def test_cases_by_another_hand():
    judged = doctor_docs.judged(doctor_docs.BLIND)
    wrong = [case.name for case, said in judged if said.verdict != case.expected]
    assert len(wrong) <= 0.03 * len(judged), wrong
    assert {case.expected for case in BLIND} == set(Cause)
    assert all(case.first for case in BLIND)


@pytest.mark.parametrize("case", [each for each in BLIND if each.is_control], ids=ids)
def test_a_control_by_another_hand_is_not_accused(case):
    assert diagnose(Known(case.facts)).findings == ()


@pytest.mark.parametrize(
    "folder", [doctor_docs.CASES, doctor_docs.BLIND], ids=lambda each: each.name
)
def test_jitter_changes_no_verdict_that_is_far_from_a_threshold(folder):
    changes = doctor_docs.changes(folder)
    assert [each for each in changes if each.margin >= doctor_docs.NEAR] == []
    assert len(changes) <= 0.05 * doctor_docs.NUM_DRAWS * len(doctor_docs.cases(folder))


def test_the_order_of_files_and_facts_does_not_matter():
    for case in CASES:
        assert diagnose(Known(case.facts[::-1])).verdict == diagnose(Known(case.facts)).verdict, (
            case.name
        )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_speaks_on_a_case_and_cites_it(rule):
    signs = [sign for case in (*CASES, *HELD_OUT) for sign in rule.find(Known(case.facts))]
    assert signs
    assert any(sign.margin >= 1.0 for sign in signs)
    for sign in signs:
        assert sign.evidence
        assert all(evidence.sources for evidence in sign.evidence), sign.evidence


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_says_what_it_needs_and_how_to_fix_it(rule):
    from headstart.doctor.vocabulary import LISTS

    assert rule.fixes
    assert rule.needs
    for path in (path for needed in rule.needs for path in needed):
        scope, _, key = path.partition(".")
        assert key in LISTS[scope].model_fields


def test_rules_are_registered_once_and_named_like_their_file():
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule.find.__module__ == f"headstart.doctor.rules.{rule.name}"
    folder = doctor_docs.ROOT / "src" / "headstart" / "doctor" / "rules"
    assert {path.stem for path in folder.glob("*.py")} == {*names, "__init__"}


def test_every_cause_but_the_last_two_has_a_rule():
    assert {rule.cause for rule in RULES} == set(Cause) - {Cause.NO_FAULT, Cause.CANNOT_SAY}


def test_the_pages_are_what_the_script_writes():
    assert doctor_docs.KEYS_PAGE.read_text(encoding="utf-8") == doctor_docs.keys_page()
    page = doctor_docs.PAGE.read_text(encoding="utf-8")
    assert page == doctor_docs.page(page), "run python scripts/doctor_docs.py"
