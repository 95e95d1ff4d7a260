"""Headstart's decision log, as `headstart node decisions --json FILE` writes it: JSON lines.

Figures are means over all requests, those that loaded nothing among them, as those of metrics are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import mean
from typing import Any

from headstart.doctor.facts import Fact, Source
from headstart.doctor.readers.base import Document, Report
from headstart.node.decisions import DECISION_SCHEMA

_NUMBERS = ("prompt_tokens", "loaded_tokens", "actual_load_s", "actual_prefill_s")
_MAX = 1e15
_TAIL = 100
"""Loads from which a 99th percentile says something."""


class DecisionsReader:
    """See the module."""

    name = "Headstart's decision log"
    is_live = True

    def knows(self, document: Document) -> bool:
        """See `Reader`."""
        first = next((line for line in document.head.splitlines() if line.strip()), "")
        return first.lstrip().startswith("{") and DECISION_SCHEMA in first

    def read(self, documents: Sequence[Document]) -> Report:
        """See `Reader`."""
        records: list[dict[str, float]] = []
        skipped: list[str] = []
        for document in documents:
            for number, line in enumerate(document.text.splitlines(), start=1):
                if not line.strip():
                    continue
                record = _record(line)
                if record is None:
                    skipped.append(f"{document.path}:{number}: no decision")
                else:
                    records.append(record)
        return Report(facts=tuple(_facts(documents[0].path, records)), skipped=tuple(skipped))


def _record(line: str) -> dict[str, float] | None:
    try:
        tree: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(tree, dict) or tree.get("schema") != DECISION_SCHEMA:
        return None
    numbers = {name: tree.get(name) for name in _NUMBERS}
    if any(isinstance(value, bool) for value in numbers.values()):
        return None
    if not all(isinstance(each, int | float) and 0 <= each <= _MAX for each in numbers.values()):
        return None
    return {name: float(value) for name, value in numbers.items() if value is not None}


def _facts(path: str, records: Sequence[dict[str, float]]) -> list[Fact]:
    if not records:
        return []
    figures = {
        "num_requests": float(len(records)),
        "prompt_tokens": mean(record["prompt_tokens"] for record in records),
        "cached_tokens": mean(record["loaded_tokens"] for record in records),
        "load": mean(record["actual_load_s"] for record in records),
        "prefill": mean(record["actual_prefill_s"] for record in records),
    }
    loaded = [record for record in records if record["loaded_tokens"] > 0]
    if len(loaded) >= _TAIL:
        loads = sorted(record["actual_load_s"] for record in loaded)
        figures["load_p99"] = loads[int(0.99 * (len(loads) - 1))]
    source = Source(path=path)
    return [Fact(key=key, value=value, source=source) for key, value in figures.items()]
