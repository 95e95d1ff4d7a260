"""What an SSD may be written: its rated endurance as bytes a day.

    DWPD   drive writes per day: so many times its capacity, each day of the warranty
    TBW    terabytes (10^12 bytes) written in all: TBW = DWPD x capacity x 365 x years of warranty

Both forms and an example are at https://blocksandfiles.com/2022/04/24/dwpd/. They count what the
host writes, under JEDEC's workloads (JESD218, JESD219), which are mostly small and random; blocks
in slabs are large, which wears a drive less. So a budget that is kept here is kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headstart.errors import ConfigError
from headstart.units import parse_nbytes

DAYS_A_YEAR = 365
DAY_S = 86400.0
_DWPD = re.compile(r"(?P<times>\d+(?:\.\d+)?)dwpd(?::(?P<capacity>.+))?", re.IGNORECASE)
_TBW = re.compile(r"(?P<amount>\d+(?:\.\d+)?)TBW:(?P<years>\d+(?:\.\d+)?)y", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endurance:
    """A rating: as many writes of a capacity a day, or as many bytes a day."""

    text: str
    drive_writes_a_day: float = 0.0
    capacity_nbytes: int | None = None
    """Of the drive; None: of the file tier."""
    nbytes_a_day: float = 0.0

    def budget_nbytes_a_day(self, file_nbytes: int) -> float:
        """For a file tier of a size: DWPD x capacity, or TBW / (365 x years)."""
        capacity = file_nbytes if self.capacity_nbytes is None else self.capacity_nbytes
        return self.drive_writes_a_day * capacity + self.nbytes_a_day


def parse_endurance(text: str) -> Endurance:
    """Of `1dwpd`, `0.3dwpd:7.68TB` (of a drive of that size) or `600TBW:5y`. Raises ConfigError."""
    compact = text.replace(" ", "")
    rated, total = _DWPD.fullmatch(compact), _TBW.fullmatch(compact)
    found = None
    if rated is not None:
        capacity = rated["capacity"]
        found = Endurance(
            text=text,
            drive_writes_a_day=float(rated["times"]),
            capacity_nbytes=None if capacity is None else parse_nbytes(capacity),
        )
    elif total is not None and float(total["years"]) > 0.0:
        days = DAYS_A_YEAR * float(total["years"])
        found = Endurance(text=text, nbytes_a_day=float(total["amount"]) * 1e12 / days)
    if found is None or found.budget_nbytes_a_day(1) <= 0.0:
        raise ConfigError(
            f"--endurance {text!r} is no rating above 0; write 1dwpd (of the file tier), "
            "1dwpd:7.68TB (of a drive that large) or 600TBW:5y"
        )
    return found


def a_day(nbytes: int, span_s: float) -> float | None:
    """What was written or read in a time, as bytes a day. None: the trace has no duration."""
    return nbytes * DAY_S / span_s if span_s > 0.0 else None
