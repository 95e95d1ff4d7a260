"""The same prompt sent twice does not hit, although it is long enough and there is room.

    cached tokens of the second < one block, prompt >= 2 blocks (1,024 tokens where none is told)

Not said where other figures say why: eviction, a restart, a block that is too large.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_LONG = 1024.0
_SHARE = 0.05


def find(known: Known) -> Iterator[Sign]:
    """Arms in which a repeat does not hit."""
    for arm in known.situations:
        told = arm.numbers("probe_cached_tokens", "prompt")
        block = arm.number("block_size")
        if told is None or told[1] < (2.0 * block if block else _LONG):
            continue
        if told[0] > _SHARE * told[1] or arm.fact("group_block_sizes") is not None:
            continue
        pool = arm.number("pool_tokens")
        if pool is not None and pool < told[1]:
            continue
        yield Sign(
            strength=Strength.COMPUTED,
            margin=min(
                ratio(_SHARE * told[1], told[0]), ratio(told[1], 2.0 * block if block else _LONG)
            ),
            share=1.0,
            evidence=(
                say(
                    "a prompt of {arm.prompt}, sent again, has {arm.probe_cached_tokens} cached",
                    arm=arm,
                ),
            ),
        )


RULE = Rule(
    name="dead_cache",
    cause=Cause.CONFIGURATION,
    needs=(("arms.probe_cached_tokens", "arms.prompt_tokens"),),
    find=find,
    fixes=(
        Fix(
            engine="vllm",
            text="look for 'prefix caching is disabled' at start: some models refuse it",
        ),
        Fix(engine="llama.cpp", text="--cache-prompt, and one slot for the conversation (id_slot)"),
        Fix(engine="tensorrt-llm", text="kv_cache_config.enable_block_reuse: true"),
        Fix(engine="tgi", text="PREFIX_CACHING=1 and USE_PREFIX_CACHING=1"),
        Fix(text="turn features off one at a time (speculation, LoRA), and probe again"),
    ),
)
