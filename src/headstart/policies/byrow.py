"""What a policy notes about each block: a number a row."""

from __future__ import annotations

from array import array
from typing import Generic, TypeVar

Number = TypeVar("Number", int, float)

_SPARE_ROWS = 1024


class ByRow(Generic[Number]):
    """One number for every row, `default` where none was set; as many as the highest row set."""

    def __init__(self, typecode: str, default: Number) -> None:
        """`typecode` as of `array.array`; the caller keeps numbers within it."""
        self._default: Number = default
        self._numbers: array[Number] = array(typecode)

    def __getitem__(self, row: int) -> Number:
        return self._numbers[row] if row < len(self._numbers) else self._default

    def __setitem__(self, row: int, number: Number) -> None:
        missing = row + 1 - len(self._numbers)
        if missing > 0:
            self._numbers.extend([self._default] * (missing + _SPARE_ROWS))
        self._numbers[row] = number
