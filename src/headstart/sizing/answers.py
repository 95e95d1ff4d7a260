"""Answers of a plan: a number, its unit, and the formula with its numbers put in."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headstart.units import format_nbytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One line of a plan."""

    key: str
    title: str
    value: float
    """In `unit`; infinite: nothing suffices."""
    unit: str
    """`B`, `s`, `B/s`, or what is counted."""
    formula: str

    @property
    def shown(self) -> str:
        """For people."""
        if not math.isfinite(self.value):
            return "none is enough"
        match self.unit:
            case "B":
                return format_nbytes(round(self.value))
            case "s":
                return format_duration(self.value)
            case "B/s":
                return f"{self.value / 1e9:.3g} GB/s"
            case _:
                text = f"{self.value:,.0f}" if self.value >= 1e4 else f"{self.value:.4g}"
                return f"{text} {self.unit}".strip()

    def document(self) -> dict[str, object]:
        """For programs: an infinite value is null."""
        value = self.value if math.isfinite(self.value) else None
        return {"key": self.key, "value": value, "unit": self.unit, "formula": self.formula}


def format_duration(seconds: float) -> str:
    """Seconds as people say them: hours above two of them."""
    if seconds >= 7200:
        return f"{seconds / 3600:.3g} h"
    return format_seconds(seconds)
