"""The decision log: what was decided for each request, and what came of it.

Bounded: the last records, and sums over all of them. A record is a JSON object of schema
`headstart.decision/1`, with the fields of `Decided` that are named there.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from itertools import islice

import msgspec

from headstart.errors import ConfigError
from headstart.node.protocol import Decided

DECISION_SCHEMA = "headstart.decision/1"
MAX_RECORDS = 10_000
_MAX_SENT = 1000
_MAX_TEXT = 128
_MAX_TIERS = 16
_MAX_SECONDS = 365 * 86400.0
_SECONDS = (
    "predicted_load_s",
    "predicted_prefill_s",
    "deadline_s",
    "actual_load_s",
    "actual_prefill_s",
    "saved_s",
    "regret_s",
)


class DecisionLog:
    """See the module. Thread-safe."""

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._records: deque[Decided] = deque(maxlen=max_records)
        self._num_added = 0
        self._lock = threading.Lock()
        self.num_by_reason: Counter[str] = Counter()
        self.saved_s = 0.0
        """Against computing everything, by the engines' models; what was lost counts below zero."""
        self.regret_s = 0.0
        """Against the best choice in hindsight."""
        self.num_late = 0
        """Requests that stopped waiting before all was there."""

    def add(self, record: Decided) -> None:
        """Note a request. Raises ConfigError for what is no number.

        What engines say is bounded here: they are not trusted with memory.
        """
        seconds = [getattr(record, name) for name in _SECONDS]
        if not all(abs(each) <= _MAX_SECONDS for each in seconds) or record.regret_s < 0.0:
            raise ConfigError("a decision's times must be a number of seconds, at most a year")
        record = msgspec.structs.replace(
            record,
            request_id=record.request_id[:_MAX_TEXT],
            reason=record.reason[:_MAX_TEXT],
            found_by_tier={
                tier[:_MAX_TEXT]: tokens
                for tier, tokens in islice(record.found_by_tier.items(), _MAX_TIERS)
            },
        )
        with self._lock:
            self._records.append(record)
            self._num_added += 1
            if len(self.num_by_reason) < _MAX_TEXT or record.reason in self.num_by_reason:
                self.num_by_reason[record.reason] += 1
            self.saved_s += record.saved_s
            self.regret_s += record.regret_s
            self.num_late += record.is_late

    def after(self, number: int) -> dict[str, object]:
        """Records after the one with a number, oldest first, as many as fit an answer.

        `last` is the number to ask with next; `num_lost` records were pushed out before.
        """
        with self._lock:
            # A number beyond the last one is of an earlier run of the node: all is new.
            number = number if 0 <= number <= self._num_added else 0
            first = self._num_added - len(self._records)
            start = min(max(0, number - first), len(self._records))
            chosen = list(self._records)[start : start + _MAX_SENT]
            return {
                "decisions": [as_json(record) for record in chosen],
                "last": first + start + len(chosen),
                "num_lost": max(0, first - number),
            }


def as_json(record: Decided) -> dict[str, object]:
    """The record as its schema has it."""
    return {
        "schema": DECISION_SCHEMA,
        "request_id": record.request_id,
        "prompt_tokens": record.prompt_tokens,
        "found_tokens": record.found_tokens,
        "found_by_tier": record.found_by_tier,
        "loaded_tokens": record.loaded_tokens,
        "reason": record.reason,
        "predicted_load_s": record.predicted_load_s,
        "predicted_prefill_s": record.predicted_prefill_s,
        "deadline_s": record.deadline_s,
        "actual_load_s": record.actual_load_s,
        "actual_prefill_s": record.actual_prefill_s,
        "saved_s": record.saved_s,
        "regret_s": record.regret_s,
        "is_late": record.is_late,
    }
