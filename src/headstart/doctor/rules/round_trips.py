"""One round trip after the other to a remote tier.

round trips a request * time of one > 20 % of the TTFT, or > computing the same tokens
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio, recompute_s
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.units import format_seconds

_SHARE = 0.2


def find(known: Known) -> Iterator[Sign]:
    """Arms that wait for the network, trip by trip."""
    for arm in known.situations:
        told = arm.numbers("round_trips", "round_trip")
        if told is None:
            continue
        total, ttft = told[0] * told[1], arm.number("ttft")
        bounds = [recompute_s(known, arm), _SHARE * ttft if ttft else None]
        bound = min((each for each in bounds if each), default=None)
        if bound is None or total <= bound:
            continue
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(total, bound),
            explained_s=total,
            evidence=(
                say(
                    "{arm.round_trips} round trips of {arm.round_trip}: {total}",
                    arm=arm,
                    total=format_seconds(total),
                ),
            ),
        )


RULE = Rule(
    name="round_trips",
    cause=Cause.SLOW_TIER,
    needs=(("arms.round_trips", "arms.round_trip", "arms.ttft_p50"),),
    find=find,
    fixes=(
        Fix(text="batch: one request for all keys of a prompt, one for all its bytes"),
        Fix(engine="lmcache", text="a larger chunk_size (a key and a read for more tokens)"),
        Fix(text="keep the index of the remote tier locally"),
    ),
)
