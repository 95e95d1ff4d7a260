"""A block that prompts, or what they share, do not fill: nothing can hit, by design.

    effective block = LCM of the block sizes of all KV groups
    tokens that can hit = floor(shared / block) * block

Hybrid models align all groups; only whole blocks of the whole set are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from headstart.doctor.arms import hit_share, hitting, ratio
from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_FEW = 0.1


def find(known: Known) -> Iterator[Sign]:
    """Arms in which less than one block is shared."""
    seen = set()
    for arm in hitting(known):
        block = effective_block(arm)
        if block is None or (hit_share(arm) or 0.0) > _FEW or arm.number("num_hits"):
            continue
        for key in ("max_model_len", "shared_tokens", "prompt_tokens", "prompt_tokens_p50"):
            length = arm.number(key)
            if length is not None and length < block and key not in seen:
                seen.add(key)
                yield _sign(
                    arm,
                    ratio(block, length),
                    f"a block of {block:,.0f} tokens against " + _WHAT[key],
                )
                return
        over = arm.number("share_over_block")
        if over is not None and over < _FEW:
            yield _sign(
                arm,
                ratio(_FEW, over),
                f"only {{arm.share_over_block}} of the prompts fill a block of {block:,.0f} tokens",
            )
            return


_WHAT = {
    "max_model_len": "a longest prompt of {arm.max_model_len}",
    "shared_tokens": "a shared prefix of {arm.shared_tokens}",
    "prompt_tokens": "prompts of {arm.prompt_tokens}",
    "prompt_tokens_p50": "prompts of {arm.prompt_tokens_p50} (median)",
}


def effective_block(arm: Group) -> float | None:
    """Tokens of the least that can be hit."""
    groups = arm.fact("group_block_sizes")
    if groups is None or not isinstance(groups.value, tuple):
        return arm.number("block_size")
    return float(math.lcm(*(max(1, round(each)) for each in groups.value)))


def _sign(arm: Group, margin: float, text: str) -> Sign:
    groups = arm.fact("group_block_sizes") is not None
    how = "; the groups have blocks of {arm.group_block_sizes}" if groups else ""
    size = "" if groups or arm.fact("block_size") is None else " (block_size {arm.block_size})"
    return Sign(
        strength=Strength.COMPUTED,
        margin=margin,
        share=1.0,
        evidence=(say(text + how + size, arm=arm),),
    )


RULE = Rule(
    name="block_too_large",
    cause=Cause.BLOCK_SIZE,
    needs=(("arms.block_size", "arms.shared_tokens"), ("arms.block_size", "arms.prompt_tokens")),
    find=find,
    fixes=(
        Fix(engine="vllm", text="a smaller --block-size; for hybrids --prefix-match-unit"),
        Fix(engine="sglang", text="a smaller --page-size"),
        Fix(engine="lmcache", text="a smaller chunk_size"),
        Fix(engine="tensorrt-llm", text="a smaller tokens_per_block; enable_partial_reuse"),
        Fix(text="make the shared text longer than a block: system prompt, tools, examples first"),
    ),
)
