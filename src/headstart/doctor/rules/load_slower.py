"""Loading takes longer than computing the same tokens: the hit costs more than the miss.

    T_load = bytes / bandwidth > T_recompute = tokens / prefill rate
    break-even bandwidth = prefill rate * KV bytes per token

Stages are of one request, so the tier's own queue is in them if they were measured under load.
Nothing is said where the load is computed to take longer than the first token.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import TOLERANCE, break_even, hitting, pairs, ratio, recompute_s
from headstart.doctor.facts import Evidence, Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Stage, Strength
from headstart.doctor.quantities import show_bytes_per_s
from headstart.doctor.split import load_s, whole
from headstart.units import format_seconds


def find(known: Known) -> Iterator[Sign]:
    """Arms whose load loses, or tiers below the break-even bandwidth."""
    for arm in hitting(known):
        load, computing = load_s(known, arm), recompute_s(known, arm)
        if load is not None and _is_of_others(arm, load):
            return
        if any(pair.hit is arm and pair.ratio < 1.0 - pair.noise for pair in pairs(known)):
            continue  # measured: with the load it is sooner than with computing
        if load is not None and computing is not None and load.seconds > computing:
            measured = load.is_measured
            yield Sign(
                strength=Strength.SEEN if measured else Strength.COMPUTED,
                margin=ratio(load.seconds, computing),
                explained_s=load.seconds - computing,
                evidence=(
                    say(
                        _loading(arm, measured) + "; computing the same tokens {computing}",
                        arm=arm,
                        load=format_seconds(load.seconds),
                        computing=format_seconds(computing),
                    ),
                    *_break_even(known),
                ),
                is_symptom=True,
            )
            return
    yield from _too_slow(known)


def _is_of_others(arm: Group, load: Stage) -> bool:
    """Whether a load is computed to outlast the first token that waited for it.

    Then its bandwidth is another one than that of all ranks, as where each rank counts its time.
    """
    ttft = whole(arm)
    return not load.is_measured and ttft is not None and load.seconds > TOLERANCE * ttft.seconds


def _loading(arm: Group, measured: bool) -> str:
    if arm.fact("load") is not None:
        return "loading takes {arm.load}"
    if measured:
        return "loading takes {load}, its parts added"
    if arm.fact("queue_load") is not None:
        return "loads are waited for in the queue for {arm.queue_load}"
    size = "load_nbytes" if arm.fact("load_nbytes") is not None else "kv_bytes_per_token"
    return f"loading takes {{load}} by size ({{arm.{size}}}) and bandwidth"


def _too_slow(known: Known) -> Iterator[Sign]:
    even = break_even(known)
    for tier in known.tiers:
        bandwidth = tier.number("bandwidth")
        if even is None or bandwidth is None or bandwidth >= even:
            continue
        yield Sign(
            strength=Strength.COMPUTED,
            margin=ratio(even, bandwidth),
            share=1.0 - bandwidth / even,
            evidence=tuple(_break_even(known)),
            is_symptom=True,
        )
        return


def _break_even(known: Known) -> Iterator[Evidence]:
    even = break_even(known)
    for tier in known.tiers:
        if even is not None and tier.number("bandwidth") is not None:
            yield say(
                "{tier.name} gives {tier.bandwidth}; loading pays from {even} (prefill rate x KV "
                "bytes a token)",
                tier=tier,
                even=show_bytes_per_s(even),
            )


RULE = Rule(
    name="load_slower",
    cause=Cause.SLOW_TIER,
    needs=(
        ("arms.load", "arms.cached_tokens", "arms.prefill_rate"),
        ("tiers.bandwidth", "arms.kv_bytes_per_token", "arms.prefill_rate"),
    ),
    find=find,
    fixes=(
        Fix(
            engine="vllm",
            text='a cap with kv_transfer_params {"max_load_tokens": N} a request, or a connector '
            "that decides between load and recompute",
            since="0.32",
        ),
        Fix(engine="sglang", text="--hicache-storage-prefetch-policy best_effort or timeout"),
        Fix(engine="lmcache", text="leave the tier out (remote_url), or give it a faster medium"),
        Fix(text="use the tier only for prompts whose load is shorter than their computation"),
        Fix(text="fewer bytes: FP8 KV halves the break-even bandwidth"),
        Fix(text="`headstart bench storage` measures what the medium gives"),
    ),
)
