"""Compression that takes longer than the bytes it saves.

    worth it only if  codec time < bytes saved / bandwidth

so a codec has a break-even bandwidth = bytes saved / codec time, above which it slows down.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import load_nbytes, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.doctor.quantities import show_bytes_per_s


def find(known: Known) -> Iterator[Sign]:
    """Arms that compress for a link that is too fast for it."""
    for arm in known.situations:
        told, size = arm.numbers("codec_ratio", "serialize"), load_nbytes(arm)
        rates = [rate for tier in known.tiers if (rate := tier.number("bandwidth"))]
        link = min(rates, default=arm.number("link_bandwidth") or 0.0)
        if told is None or not size or not link or not told[1]:
            continue
        even = size * (1.0 - told[0]) / told[1]
        if link > even:
            yield Sign(
                strength=Strength.COMPUTED,
                margin=ratio(link, even),
                explained_s=told[1] - size * (1.0 - told[0]) / link,
                evidence=(
                    say(
                        "the codec takes {arm.serialize} and saves bytes worth it below {even}; "
                        "the medium gives {link}",
                        arm=arm,
                        even=show_bytes_per_s(even),
                        link=show_bytes_per_s(link),
                    ),
                ),
            )


RULE = Rule(
    name="codec",
    cause=Cause.SERIALIZATION,
    needs=(("arms.codec_ratio", "arms.serialize", "arms.load_nbytes", "tiers.bandwidth"),),
    find=find,
    fixes=(
        Fix(engine="lmcache", text="remote_serde: naive on this link"),
        Fix(text="compress only for tiers slower than the break-even bandwidth"),
    ),
)
