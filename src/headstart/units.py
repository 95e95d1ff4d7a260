"""Bytes and seconds as people write them: `"64GiB"` to bytes and back.

Sizes are whole bytes inside the program; units appear only in settings and output. Decimal
(`GB`) and binary (`GiB`) units are told apart, because a tier that is 7 % larger than its disk
does not fit it.
"""

from __future__ import annotations

import re

from headstart.errors import ConfigError

PAGE_NBYTES = 4096
"""Alignment of block memory and direct I/O: the memory page, a multiple of every sector size."""

_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_SIZES = {"": 1, "B": 1, **_BINARY, **_DECIMAL}
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_nbytes(text: str | int) -> int:
    """Bytes of a size such as `"64GiB"`, `"1.5TB"` or `4096`.

    Raises ConfigError for a negative, fractional or unreadable size.
    """
    value, unit = _quantity(text, _SIZES, example='"64GiB" or "500GB"')
    nbytes = value * unit
    if nbytes != int(nbytes):
        raise ConfigError(f"size {text!r} is not a whole number of bytes")
    return int(nbytes)


def parse_seconds(text: str | float) -> float:
    """Seconds of a duration such as `"30d"`, `"2h"`, `"250ms"` or `1.5`.

    Raises ConfigError for a negative or unreadable duration.
    """
    if isinstance(text, str) and not re.search(r"[a-z]", text):
        text = f"{text}s"
    value, unit = _quantity(text, _SECONDS | {"": 1.0}, example='"30d" or "250ms"')
    return value * unit


def _quantity(
    text: str | float, units: dict[str, int] | dict[str, float], *, example: str
) -> tuple[float, float]:
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ConfigError(f"{text!r} is not a quantity; write {example}")
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        raise ConfigError(f"{text!r} is not a quantity; write {example}")
    number, unit = match.groups()
    if unit not in units:
        allowed = ", ".join(name for name in units if name)
        raise ConfigError(f"unit {unit!r} in {text!r} is unknown; allowed: {allowed}")
    return float(number), units[unit]


def format_nbytes(nbytes: int) -> str:
    """A size for people, three significant digits, binary units: `1536` is `"1.5 KiB"`."""
    value, unit = float(nbytes), "B"
    for name, factor in _BINARY.items():
        if nbytes < factor:
            break
        value, unit = nbytes / factor, name
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def format_seconds(seconds: float) -> str:
    """A duration for people, three significant digits: `0.0123` is `"12.3 ms"`."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds > 0 else "0 s"


def align_up(nbytes: int, alignment: int = PAGE_NBYTES) -> int:
    """The smallest multiple of `alignment` that is >= `nbytes`."""
    return -(-nbytes // alignment) * alignment
