"""Hits that hang on where the shared prefix ends between two block boundaries.

    hits with s shared tokens, none with s' < s, s - s' < b, floor(s / b) > floor(s' / b)

Models with recurrent state keep it at few boundaries (a checkpoint); only a prefix that reaches one
can be resumed.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import hit_share, hitting, is_low
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_GONE = 0.2


def find(known: Known) -> Iterator[Sign]:
    """Two arms on the two sides of a boundary."""
    for more in hitting(known):
        for less in hitting(known):
            longer, shorter = more.number("shared_tokens"), less.number("shared_tokens")
            block = more.number("block_size")
            hits = hit_share(more), hit_share(less)
            if not longer or not shorter or not block or hits[0] is None or hits[1] is None:
                continue
            if not 0.0 < longer - shorter < block or hits[1] > _GONE * hits[0] or is_low(hits[0]):
                continue
            if longer // block > shorter // block:
                gone = (less.number("ttft") or 0.0) - (more.number("ttft") or 0.0)
                yield Sign(
                    strength=Strength.COMPUTED,
                    margin=longer / (longer // block * block),
                    explained_s=gone if gone > 0.0 else None,
                    evidence=(
                        say(
                            "{more.shared_tokens} shared: {more.hit_rate} hit; "
                            "{less.shared_tokens} shared: {less.hit_rate}; a block of "
                            "{more.block_size} lies between",
                            more=more,
                            less=less,
                        ),
                    ),
                )


RULE = Rule(
    name="boundary",
    cause=Cause.BLOCK_SIZE,
    needs=(("arms.shared_tokens", "arms.hit_rate", "arms.block_size"),),
    find=find,
    fixes=(
        Fix(text="pad or cut the shared text to a block boundary"),
        Fix(engine="vllm", text="a smaller --block-size, or more state checkpoints a request"),
        Fix(engine="llama.cpp", text="--ctx-checkpoints higher, --checkpoint-min-step lower"),
    ),
)
