"""What `headstart doctor --json` writes."""

from __future__ import annotations

from headstart.doctor.findings import Diagnosis, Finding, Split

SCHEMA = "headstart.doctor/1"


def document(diagnosis: Diagnosis) -> dict[str, object]:
    """The diagnosis as its schema has it; evidence ends with the files and lines it is from."""
    return {
        "schema": SCHEMA,
        "verdict": str(diagnosis.verdict),
        "findings": [_finding(each) for each in diagnosis.findings],
        "healthy": [str(each) for each in diagnosis.healthy],
        "missing": list(diagnosis.missing),
        "ttft": [_split(each) for each in diagnosis.splits],
        "notes": list(diagnosis.notes),
    }


def _finding(finding: Finding) -> dict[str, object]:
    return {
        "cause": str(finding.cause),
        "rule": finding.rule,
        "confidence": finding.confidence,
        "explained_s": finding.explained_s,
        "margin": round(finding.margin, 3),
        "evidence": [str(each) for each in finding.evidence],
        "fix": list(finding.fixes),
    }


def _split(split: Split) -> dict[str, object]:
    return {
        "arm": split.arm,
        "ttft_s": split.ttft_s,
        "stages": [
            {"name": stage.name, "seconds": stage.seconds, "measured": stage.is_measured}
            for stage in split.stages
        ],
    }
