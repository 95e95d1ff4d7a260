"""A printed rate that is not its own size by its own time, or that another tool contradicts.

    rate = size / time

Beyond a factor of 2: GB against GiB is 7 %, and three figures each off by 20 % are 1.9.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.doctor.quantities import show_bytes_per_s

_OFF = 2.0


def find(known: Known) -> Iterator[Sign]:
    """A log line that contradicts itself, or another tool."""
    for line in known.log_rates:
        told = line.numbers("size", "time")
        if told is None or not told[1]:
            continue
        rate = told[0] / told[1]
        for key, what in (("printed", "the line says"), ("other", "another tool measured")):
            stated = line.number(key)
            if stated is None:
                continue
            off = max(ratio(rate, stated), ratio(stated, rate))
            if off > _OFF:
                yield Sign(
                    strength=Strength.COMPUTED,
                    margin=off / _OFF,
                    evidence=(
                        say(
                            "{line.size} in {line.time} are {rate}; " + what + f" {{line.{key}}}",
                            line=line,
                            rate=show_bytes_per_s(rate),
                        ),
                    ),
                )


RULE = Rule(
    name="printed_rate",
    cause=Cause.MEASUREMENT,
    needs=(
        ("log_rates.size", "log_rates.time", "log_rates.printed"),
        ("log_rates.size", "log_rates.time", "log_rates.other"),
    ),
    find=find,
    fixes=(
        Fix(text="compute rates from size and time yourself; say GB or GiB"),
        Fix(text="time until the copy is done, not until it is launched (synchronise the stream)"),
    ),
)
