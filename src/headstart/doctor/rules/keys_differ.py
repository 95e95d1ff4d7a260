"""The same tokens get another key: in another process, or on another path of the same one."""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength


def find(known: Known) -> Iterator[Sign]:
    """Keys that do not agree."""
    for arm in known.situations:
        if arm.says("same_key", False):
            yield Sign(
                strength=Strength.SEEN,
                margin=TOLERANCE,
                share=1.0,
                evidence=(say("the same tokens get the same key: {arm.same_key}", arm=arm),),
            )
            return


RULE = Rule(
    name="keys_differ",
    cause=Cause.CONFIGURATION,
    needs=(("arms.same_key",),),
    find=find,
    fixes=(
        Fix(engine="lmcache", text="PYTHONHASHSEED=0 for every process that shares the cache"),
        Fix(engine="vllm", text="--prefix-caching-hash-algo sha256_cbor and one PYTHONHASHSEED"),
        Fix(text="one salt, one tokenizer and one chat template for warm-up and requests"),
    ),
)
