"""From facts to a verdict: all rules, their confidence, their order. Pure.

    confidence = strength * (0.7 + 0.3 * min(1, log(margin) / log(1.5)))

so that a figure just over its threshold counts for less than one that would be over it even if the
figures were 20 % off. Causes are ranked by the share of the first token's time that they explain
times their confidence. Two come before that: figures that cannot be right (what follows from them
is worth nothing), and wrong answers (no speed makes up for them).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from headstart.doctor.arms import MATERIAL, TOLERANCE, subject
from headstart.doctor.facts import Evidence, Group, Known
from headstart.doctor.findings import Cause, Diagnosis, Finding, Rule, Sign, Split
from headstart.doctor.fixes import choose
from headstart.doctor.health import signs_of_health
from headstart.doctor.missing import missing
from headstart.doctor.rules import RULES
from headstart.doctor.split import splits
from headstart.units import format_seconds

_LEAST = 0.4
"""Confidence below which a cause is not named."""
_UNKNOWN_SHARE = 0.5
_SYMPTOM = 0.6
_MAX_EVIDENCE = 8
_UNACCOUNTED = 0.5


def diagnose(
    known: Known, *, rules: Sequence[Rule] = RULES, skipped: Iterable[str] = ()
) -> Diagnosis:
    """What is the matter. `skipped` is what readers could not use, for the notes."""
    found = [finding for rule in rules for finding in _findings(rule, known)]
    findings = tuple(sorted(_by_cause(found), key=lambda each: _rank(each, known)))
    healthy = tuple(signs_of_health(known))
    parts = tuple(splits(known))
    otherwise = Cause.NO_FAULT if healthy else Cause.CANNOT_SAY
    return Diagnosis(
        verdict=findings[0].cause if findings else otherwise,
        findings=findings,
        healthy=healthy,
        missing=missing(
            known,
            rules,
            {finding.rule for finding in found},
            {finding.cause for finding in findings},
        ),
        splits=parts,
        notes=(*skipped, *_unaccounted(parts)),
    )


def _unaccounted(parts: Iterable[Split]) -> Iterable[str]:
    for split in parts:
        rest = split.stages[-1].seconds
        if rest > _UNACCOUNTED * split.ttft_s:
            where = f" of {split.arm}" if split.arm else ""
            yield (
                f"{format_seconds(rest)}{where} are in no stage that was told: measure between "
                "arrival, look-up, load, prefill and first token"
            )


def _findings(rule: Rule, known: Known) -> Iterable[Finding]:
    for sign in rule.find(known):
        finding = _finding(rule, sign, known)
        if finding.confidence >= _LEAST and finding.margin >= 1.0:
            yield finding


def _finding(rule: Rule, sign: Sign, known: Known) -> Finding:
    margin = sign.margin
    arm = subject(known)
    ttft = arm.number("ttft") if arm else None
    if sign.explained_s is not None and ttft:
        margin = min(margin, sign.explained_s / ttft / MATERIAL)
    certain = math.log(max(1.0, margin)) / math.log(TOLERANCE)
    return Finding(
        cause=rule.cause,
        rule=rule.name,
        confidence=round(sign.strength.value * (0.7 + 0.3 * min(1.0, certain)), 3),
        explained_s=sign.explained_s,
        evidence=sign.evidence,
        fixes=choose(known, (*sign.fixes, *rule.fixes)),
        margin=margin,
        is_symptom=sign.is_symptom,
        share=sign.share,
    )


def _by_cause(findings: Iterable[Finding]) -> list[Finding]:
    """One finding a cause: the surest, with what else speaks for it."""
    best: dict[Cause, Finding] = {}
    for finding in sorted(findings, key=lambda each: -each.confidence):
        first = best.get(finding.cause)
        if first is None:
            best[finding.cause] = finding
            continue
        seconds = [s for s in (first.explained_s, finding.explained_s) if s is not None]
        best[finding.cause] = replace(
            first,
            explained_s=max(seconds, default=None),
            evidence=_distinct((*first.evidence, *finding.evidence))[:_MAX_EVIDENCE],
            fixes=tuple(dict.fromkeys((*first.fixes, *finding.fixes))),
            is_symptom=first.is_symptom and finding.is_symptom,
        )
    return list(best.values())


def _distinct(evidence: Sequence[Evidence]) -> tuple[Evidence, ...]:
    return tuple({str(each): each for each in evidence}.values())


def _rank(finding: Finding, known: Known) -> tuple[int, float, str]:
    """Smaller is earlier."""
    before = {Cause.MEASUREMENT: 0, Cause.CORRECTNESS: 1}.get(finding.cause, 2)
    return before, -_weight(finding, subject(known)), finding.cause


def _weight(finding: Finding, arm: Group | None) -> float:
    ttft = arm.number("ttft") if arm else None
    share = _UNKNOWN_SHARE if finding.share is None else finding.share
    if finding.explained_s is not None and ttft:
        share = finding.explained_s / ttft
    return min(1.0, share) * finding.confidence * (_SYMPTOM if finding.is_symptom else 1.0)
