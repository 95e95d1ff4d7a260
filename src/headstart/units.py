"""Bytes and seconds as people write them: `"64GiB"` to bytes and back.

Sizes are whole bytes inside the program; units appear only in settings and output. Decimal
(`GB`) and binary (`GiB`) units are told apart, because a tier that is 7 % larger than its disk
does not fit it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

from headstart.errors import ConfigError

PAGE_NBYTES = 4096
"""Alignment of block memory and direct I/O: the memory page, a multiple of every sector size."""

_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_SIZES = {"": 1, "B": 1, **_BINARY, **_DECIMAL}
_SECONDS: dict[str, Fraction | int] = {
    "": 1,
    "ms": Fraction(1, 1000),
    "s": 1,
    "min": 60,
    "h": 3600,
    "d": 86400,
}
_MAX_DIGITS = 100
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_nbytes(text: str | int) -> int:
    """Bytes of a size such as `"64GiB"`, `"1.5TB"` or `4096`, exactly.

    Raises ConfigError for a negative, fractional or unreadable size.
    """
    nbytes = _quantity(text, _SIZES, example='"64GiB" or "500GB"')
    if nbytes.denominator != 1:
        raise ConfigError(f"size {text!r} is not a whole number of bytes")
    return int(nbytes)


def parse_seconds(text: str | float) -> float:
    """Seconds of a duration such as `"30d"`, `"2h"`, `"250ms"` or `1.5`.

    Raises ConfigError for a negative or unreadable duration.
    """
    if isinstance(text, float) and math.isfinite(text) and text >= 0:
        return text  # its text could have an exponent
    return float(_quantity(text, _SECONDS, example='"30d" or "250ms"'))


def _quantity(text: str | float, units: Mapping[str, Fraction | int], *, example: str) -> Fraction:
    """An exact product: in floating point 1.001 kB would be 1000.9999999999999 bytes."""
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ConfigError(f"{text!r} is not a quantity; write {example}")
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        raise ConfigError(f"{text!r} is not a quantity; write {example}")
    number, unit = match.groups()
    if unit not in units:
        allowed = ", ".join(name for name in units if name)
        raise ConfigError(f"unit {unit!r} in {text!r} is unknown; allowed: {allowed}")
    if len(number) > _MAX_DIGITS:
        raise ConfigError(f"{number[:_MAX_DIGITS]}... is beyond all bounds; write {example}")
    return Fraction(number) * units[unit]


def format_nbytes(nbytes: int) -> str:
    """A size for people, three significant digits, binary units: `1536` is `"1.5 KiB"`."""
    value, unit = float(nbytes), "B"
    for name, factor in _BINARY.items():
        if nbytes < factor:
            break
        value, unit = nbytes / factor, name
    return f"{_digits(value)} {unit}"


def format_seconds(seconds: float) -> str:
    """A duration for people, three significant digits: `0.0123` is `"12.3 ms"`."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= factor:
            return f"{_digits(seconds / factor)} {unit}"
    return f"{_digits(seconds * 1e9)} ns" if seconds > 0 else "0 s"


def _digits(value: float) -> str:
    """Three significant digits, and never an exponent."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def align_up(nbytes: int, alignment: int = PAGE_NBYTES) -> int:
    """The smallest multiple of `alignment` that is >= `nbytes`."""
    return -(-nbytes // alignment) * alignment
