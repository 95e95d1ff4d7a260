"""Time that passes in the client: its TTFT against the server's.

    client TTFT / server TTFT > 1.5

Both medians; less may be the network and rounding (`TOLERANCE`). vLLM's per-request
`time_to_first_token_ms` begins when the request is scheduled, so its queue has to be added.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength


def find(known: Known) -> Iterator[Sign]:
    """An arm in which the client sees far more than the server did."""
    for arm in known.situations:
        told = arm.numbers("ttft", "ttft_server")
        if told is None:
            continue
        client, server = told
        if client > TOLERANCE * server:
            yield Sign(
                strength=Strength.COMPUTED,
                margin=ratio(client, TOLERANCE * server),
                explained_s=client - server,
                evidence=(
                    say(
                        "the client sees {arm.ttft}, the server {arm.ttft_server}: the difference "
                        "is outside of the server",
                        arm=arm,
                    ),
                ),
            )


RULE = Rule(
    name="client_side",
    cause=Cause.MEASUREMENT,
    needs=(("arms.ttft_p50", "arms.ttft_server"),),
    find=find,
    fixes=(
        Fix(text="set the client's CPU governor to performance, and give it cores of its own"),
        Fix(text="compare with the server's histogram of the time to the first token"),
    ),
)
