"""Embedding is what takes the time.

the embedder is loaded or built for each request: its load is over 30 % of the embedding
more than one embedding a request (1.5): a miss embeds again to store
embedding under load / alone > 2: its threads fight for cores
(embedding + search) / TTFT > 20 %
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.facts import Group, Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_LOAD = 0.3
_TWICE = 1.5
_THRASH = 2.0
_SHARE = 0.2


def find(known: Known) -> Iterator[Sign]:
    """Arms with a slow embedder."""
    for arm in known.situations:
        embed = arm.number("embed")
        if embed is None:
            continue
        load, alone = arm.number("embedder_load"), arm.number("embed_alone")
        embeds, ttft = arm.number("embeds_per_request"), arm.number("ttft")
        if load is not None and load > _LOAD * embed:
            yield _sign(
                arm,
                load / (_LOAD * embed),
                load,
                "of {arm.embed} to embed, {arm.embedder_load} is loading the embedder",
            )
        if embeds is not None and embeds > _TWICE:
            again = (embeds - 1.0) * embed
            yield _sign(
                arm,
                embeds / _TWICE,
                again,
                "{arm.embeds_per_request} embeddings a request, {arm.embed} each",
            )
        if alone and embed > _THRASH * alone:
            yield _sign(
                arm,
                embed / (_THRASH * alone),
                embed - alone,
                "embedding takes {arm.embed} under load, {arm.embed_alone} alone",
            )
        cost = embed + (arm.number("ann") or 0.0)
        if ttft and cost > _SHARE * ttft:
            search = " and {arm.ann} to search" if arm.number("ann") else ""
            yield _sign(
                arm,
                cost / (_SHARE * ttft),
                cost,
                "{arm.embed} to embed" + search + ", of a first token of {arm.ttft}",
            )


def _sign(arm: Group, margin: float, seconds: float, text: str) -> Sign:
    return Sign(
        strength=Strength.SEEN,
        margin=margin,
        explained_s=seconds,
        evidence=(say(text, arm=arm),),
    )


RULE = Rule(
    name="semantic_embedder",
    cause=Cause.SEMANTIC_CACHE,
    needs=(
        ("arms.embed", "arms.ttft_p50"),
        ("arms.embed", "arms.embed_alone"),
        ("arms.embed", "arms.embedder_load"),
    ),
    find=find,
    fixes=(
        Fix(text="load the embedder once, at start; keep its tokenizer"),
        Fix(text="one thread an embedding (OMP_NUM_THREADS=1) when several run at once"),
        Fix(text="keep embeddings of questions already seen; hand the query's to the store"),
    ),
)
