"""How numbers are written in an observations file: plain in base units, or as text with a unit.

Each kind says how it is read, how it is shown to people, and what is documented about it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

from headstart.errors import ConfigError
from headstart.units import format_nbytes, format_seconds, parse_nbytes, parse_seconds

_MAX = 1e30
"""Larger is no figure of anything, and products of such are infinite."""
_SMALL = {"us": 1e-6, "ns": 1e-9}
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*(.*?)\s*")


@dataclass(frozen=True, slots=True)
class Unit:
    """A kind of quantity."""

    name: str
    """As the documentation has it."""
    show: Callable[[Any], str]


def _split(value: object, example: str) -> tuple[float, str]:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f"{value!r} is no number; write {example}")
    match = _NUMBER.fullmatch(str(value))
    if match is None or float(match[1]) > _MAX:
        raise ConfigError(f"{value!r} is no number of at least 0; write {example}")
    return float(match[1]), match[2]


def seconds(value: object) -> float:
    """Seconds of `1.5`, `"250 ms"`, `"2.3 us"`. Raises ConfigError."""
    number, unit = _split(value, '0.25 or "250 ms"')
    if unit in _SMALL:
        return number * _SMALL[unit]
    return parse_seconds(str(value)) if unit else number


def nbytes(value: object) -> float:
    """Bytes of `4096`, `"145 kB"`, `"1.5 GiB"`. Raises ConfigError."""
    number, unit = _split(value, '4096 or "145 kB"')
    return number * parse_nbytes(f"1 {unit}") if unit else number


def bytes_per_s(value: object) -> float:
    """Bytes a second of `1.25e9`, `"1.25 GB/s"`, `"200 Gbit/s"`. Raises ConfigError."""
    number, unit = _split(value, '"1.25 GB/s" or "200 Gbit/s"')
    if not unit:
        return number
    size, slash, per = unit.partition("/")
    if not slash or per != "s":
        raise ConfigError(f'{value!r} is no rate; write "1.25 GB/s" or "200 Gbit/s"')
    if size.endswith("bit"):
        prefix = size.removesuffix("bit")
        if prefix not in _PREFIXES:
            raise ConfigError(f"unit {unit!r} in {value!r} is unknown; write Gbit/s or Mbit/s")
        return number * _PREFIXES[prefix] / 8
    return number * parse_nbytes(f"1 {size}")


def share(value: object) -> float:
    """A share of `0.665` or `"66.5 %"`. Raises ConfigError outside 0 to 1."""
    number, unit = _split(value, '0.665 or "66.5 %"')
    if unit not in ("", "%"):
        raise ConfigError(f'{value!r} is no share; write 0.665 or "66.5 %"')
    number = number / 100 if unit else number
    if number > 1.0:
        raise ConfigError(f'{value!r} is above 1; write 0.665 or "66.5 %"')
    return number


def _counted(*words: str) -> Callable[[object], float]:
    """Reads a number of something; `words` are what it may be followed by."""

    def count(value: object) -> float:
        """A number such as `8`, `"70 G"` or `"9 k tokens"`. Raises ConfigError."""
        number, unit = _split(value, '8 or "70 G"')
        word = next((each for each in words if unit.endswith(each)), "")
        prefix = unit.removesuffix(word).strip()
        if prefix not in _PREFIXES:
            named = "".join(f", and {word} behind it" for word in words[:1])
            raise ConfigError(
                f"{value!r} has the unit {unit!r}; a plain number, or one with k, M, G{named}"
            )
        return number * _PREFIXES[prefix]

    return count


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _large(value: float) -> str:
    for prefix in ("P", "T", "G", "M"):
        if value >= _PREFIXES[prefix]:
            return f"{value / _PREFIXES[prefix]:.3g} {prefix}"
    return _plain(value)


def show_bytes_per_s(value: float) -> str:
    """A rate for people, decimal units: `"1.25 GB/s"`."""
    for prefix in ("T", "G", "M", "k"):
        if value >= _PREFIXES[prefix]:
            return f"{value / _PREFIXES[prefix]:.3g} {prefix}B/s"
    return f"{value:.3g} B/s"


def show_signed_seconds(value: float) -> str:
    """A duration for people that may be below zero: `"-60 ms"`."""
    return format_seconds(value) if value >= 0 else f"-{format_seconds(-value)}"


def show_share(value: float) -> str:
    """A share for people: `"66.5 %"`."""
    return f"{100 * value:.3g} %"


SECONDS = Unit("seconds", format_seconds)
NBYTES = Unit("bytes", lambda value: format_nbytes(round(value)))
BYTES_PER_S = Unit("bytes/s", show_bytes_per_s)
SHARE = Unit("share", show_share)
TOKENS = Unit("tokens", lambda value: f"{_plain(value)} tokens")
TOKENS_PER_S = Unit("tokens/s", lambda value: f"{_plain(value)} tokens/s")
PER_S = Unit("1/s", lambda value: f"{_plain(value)}/s")
COUNT = Unit("number", _large)
FLOPS = Unit("FLOP/s", lambda value: f"{_large(value)}FLOP/s")
FLAG = Unit("true or false", lambda value: "yes" if value else "no")
TEXT = Unit("text", str)

Seconds = Annotated[float, BeforeValidator(seconds), SECONDS]
Nbytes = Annotated[float, BeforeValidator(nbytes), NBYTES]
BytesPerS = Annotated[float, BeforeValidator(bytes_per_s), BYTES_PER_S]
Share = Annotated[float, BeforeValidator(share), SHARE]
Tokens = Annotated[float, BeforeValidator(_counted("tokens", "tok")), TOKENS]
TokensPerS = Annotated[float, BeforeValidator(_counted("tokens/s", "tok/s", "t/s")), TOKENS_PER_S]
PerS = Annotated[float, BeforeValidator(_counted("req/s", "1/s", "/s")), PER_S]
Count = Annotated[float, BeforeValidator(_counted()), COUNT]
Flops = Annotated[float, BeforeValidator(_counted("FLOP/s", "FLOPS")), FLOPS]
Flag = Annotated[bool, FLAG]
Text = Annotated[str, TEXT]
