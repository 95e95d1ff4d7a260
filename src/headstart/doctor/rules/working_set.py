"""More is in use than fits, so what will be asked again is evicted before.

    working set = sessions * tokens of each > pool of the device + pool of the host
    tokens asked between two uses > pool: LRU hits nothing

With a cyclic order LRU evicts exactly what comes next: the hit rate is not proportional, it is 0.
Not said where the hit rate is as high as the load allows.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import hit_share, hits_well, hitting, ratio, working_set
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength


def find(known: Known) -> Iterator[Sign]:
    """Arms whose working set is larger than the pool."""
    for arm in hitting(known):
        pool, room = _room(arm)
        needed = working_set(arm)
        if not pool or hits_well(arm) or needed is None or needed <= pool:
            continue
        cyclic = arm.text("access") == "cyclic"
        what = (
            "{arm.sessions} sessions of {arm.session_tokens}"
            if arm.numbers("sessions", "session_tokens")
            else "{arm.reuse_distance} between two uses"
        )
        order = ", all in turn: LRU evicts what comes next" if cyclic else ""
        yield Sign(
            strength=Strength.SEEN if cyclic and hit_share(arm) is not None else Strength.COMPUTED,
            margin=ratio(needed, pool),
            share=1.0 if cyclic else 1.0 - pool / needed,
            evidence=(say(f"{what}, and room for {room}{order}", arm=arm),),
        )


def _room(arm: Group) -> tuple[float, str]:
    """Tokens that fit device and host together, and that in words."""
    keys = [key for key in ("pool_tokens", "host_pool_tokens") if arm.number(key)]
    where = {"pool_tokens": "", "host_pool_tokens": " in host memory"}
    words = " and ".join(f"{{arm.{key}}}{where[key]}" for key in keys)
    return sum(arm.number(key) or 0.0 for key in keys), words


RULE = Rule(
    name="working_set",
    cause=Cause.EVICTION_THRASH,
    needs=(
        ("arms.sessions", "arms.session_tokens", "arms.pool_tokens"),
        ("arms.sessions", "arms.session_tokens", "arms.host_pool_tokens"),
        ("arms.reuse_distance", "arms.pool_tokens"),
    ),
    find=find,
    fixes=(
        Fix(text="a pool for the working set: FP8 KV, more memory, or a tier of host memory below"),
        Fix(text="fewer sessions at a time on a replica: sticky routing"),
        Fix(text="an order other than round: the same document's questions one after the other"),
        Fix(engine="sglang", text="--radix-eviction-policy lfu or slru"),
        Fix(engine="vllm", text="kv_connector_extra_config eviction_policy arc for the host tier"),
    ),
)
