"""Looking up costs more than a look-up may.

    (hash + look-up) / TTFT > 20 %
    hash + look-up > hit tokens / prefill rate: asking costs more than the hit saves

Hashing a token takes under 100 ns and a look-up microseconds (8,192 keys among a million: 46 us in
this project's index), so a fifth of a first token is no price of the thing itself. Waiting for
locks is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio, recompute_s
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength
from headstart.units import format_seconds

_SHARE = 0.2


def find(known: Known) -> Iterator[Sign]:
    """Arms whose look-up is a large part of the first token, or larger than its gain."""
    for arm in known.situations:
        told = [arm.number(key) for key in ("hash", "lookup")]
        waits = arm.number("lock_wait") or 0.0
        cost = sum(each for each in told if each is not None) - waits
        if cost <= 0.0:
            continue
        keys = [key for key, each in zip(("hash", "lookup"), told, strict=True) if each]
        spelled = " and ".join(f"{{arm.{key}}} for the {key}" for key in keys)
        saved = recompute_s(known, arm)
        ttft = arm.number("ttft")
        if saved is not None and cost > saved:
            yield Sign(
                strength=Strength.SEEN,
                margin=ratio(cost, saved),
                explained_s=cost,
                evidence=(
                    say(spelled + ", to save {saved}", arm=arm, saved=format_seconds(saved)),
                ),
            )
        elif ttft and cost > _SHARE * ttft:
            yield Sign(
                strength=Strength.SEEN,
                margin=ratio(cost, _SHARE * ttft),
                explained_s=cost,
                evidence=(say(spelled + ", of a first token of {arm.ttft}", arm=arm),),
            )


RULE = Rule(
    name="lookup_cost",
    cause=Cause.LOOKUP_CPU,
    needs=(("arms.lookup", "arms.ttft_p50"), ("arms.hash", "arms.ttft_p50")),
    find=find,
    fixes=(
        Fix(engine="vllm", text="--prefix-caching-hash-algo xxhash where no one forges prompts"),
        Fix(engine="vllm", text="a larger --block-size: one key for more tokens"),
        Fix(engine="lmcache", text="a larger chunk_size, and batched existence checks"),
        Fix(engine="sglang", text="a larger --page-size"),
        Fix(text="hash images and files by their raw bytes, once"),
        Fix(text="a hash table or radix tree with preallocated nodes instead of a list or a scan"),
    ),
)
