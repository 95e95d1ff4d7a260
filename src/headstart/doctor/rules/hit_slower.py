"""With hits from a lower tier the first token is later than without.

    TTFT(hit) / TTFT(computed) > 1 + noise

Whatever makes it slow, it is on the way of the tier: look-up, transfer, copies. Not said where
nothing was hit, where no lower tier is in use, or where the queue is what grew.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import Pair, hit_share, is_low, pairs
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.doctor.split import queued_s

_NOTHING = 0.05


def find(known: Known) -> Iterator[Sign]:
    """Pairs that lose."""
    for pair in pairs(known):
        if pair.ratio <= 1.0 + pair.noise or is_low(hit_share(pair.hit), _NOTHING):
            continue
        if not _has_tier(known, pair.hit) or _queued(known, pair):
            continue
        yield Sign(
            strength=Strength.COMPARED,
            margin=pair.ratio / (1.0 + pair.noise),
            explained_s=-pair.gain_s,
            evidence=(
                say(
                    f"{{hit.name}}: first token after {{hit.{pair.key}}}; {{without.name}}: "
                    f"{{without.{pair.key}}}",
                    hit=pair.hit,
                    without=pair.without,
                ),
            ),
            is_symptom=True,
        )


def _has_tier(known: Known, arm: Group) -> bool:
    keys = ("load", "external_hit_rate", "load_tokens", "transfer", "found_tokens")
    if known.tiers or any(arm.fact(key) is not None for key in keys):
        return True
    # A connector alone may be there for something else, such as to hand KV from host to host.
    return bool(known.connector) and (arm.text("cache") == "warm" or hit_share(arm) is not None)


def _queued(known: Known, pair: Pair) -> bool:
    queue, before = queued_s(known, pair.hit), queued_s(known, pair.without)
    return queue is not None and queue - (before or 0.0) > -0.5 * pair.gain_s


RULE = Rule(
    name="hit_slower",
    cause=Cause.SLOW_TIER,
    needs=(("arms.ttft_p50", "arms.cache", "tiers.bandwidth"),),
    find=find,
    fixes=(
        Fix(
            text="measure the tier alone: its bandwidth with the block size and depth that are used"
        ),
        Fix(
            engine="lmcache",
            text="batched reads, a larger chunk_size, a client with connections of its own",
        ),
        Fix(text="serve from the tier only what takes longer to compute than to load"),
    ),
)
