"""Loads: what they share, what they do not, and what a cache could know of them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.bench.load import (
    SALT_TOKENS,
    WORKLOADS,
    Ask,
    Shape,
    fingerprint,
    make_load,
    salted,
    theoretical_hits,
)
from headstart.errors import ConfigError

SHAPE = Shape(
    sessions=5, turns=3, shared_tokens=64, own_tokens=10, output_tokens=4, documents=4, think_s=2.0
)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_seed_gives_the_same_load(workload):
    one = make_load(workload, SHAPE)
    assert make_load(workload, SHAPE) == one
    assert len(one) == (15 if workload == "multi-turn" else 5)
    other = make_load(workload, Shape(sessions=5, seed=1))
    assert fingerprint(one) != fingerprint(other)
    assert all(0 < token < 32_000 for ask in one for token in ask.tokens)


def test_a_turn_continues_the_one_before():
    asks = make_load("multi-turn", SHAPE)
    mine = [ask for ask in asks if ask.session == "2"]
    assert [ask.turn for ask in mine] == [0, 1, 2]
    assert [ask.think_s for ask in mine] == [0.0, 2.0, 2.0]
    assert [len(ask.tokens) for ask in mine] == [74, 88, 102]
    for earlier, later in pairwise(mine):
        assert later.tokens[: len(earlier.tokens)] == earlier.tokens
    assert len({ask.tokens[:64] for ask in asks}) == 1


def test_documents_are_the_same_in_another_order():
    asks = make_load("rag", SHAPE)
    chunks = [[ask.tokens[n : n + 16] for n in range(0, 64, 16)] for ask in asks]
    assert {frozenset(each) for each in chunks} == {frozenset(chunks[0])}
    assert len({tuple(each) for each in chunks}) > 1


def test_salts_stand_before_and_behind_what_is_shared():
    asks = make_load("shared-prefix", SHAPE)
    one, again, other = (salted(asks, salt, SHAPE) for salt in ("a", "a", "b"))
    assert one == again
    own = SALT_TOKENS + 64
    assert len({ask.tokens[:own] for ask in one}) == 1
    assert one[0].num_shared == own
    assert len({ask.tokens[own : own + SALT_TOKENS] for ask in one}) == 5
    assert {ask.tokens[:SALT_TOKENS] for ask in one} & {
        ask.tokens[:SALT_TOKENS] for ask in other
    } == set()
    assert theoretical_hits([*one, *other], 8)[5] == 0, "no run profits from another"
    assert fingerprint(one) != fingerprint(other)


def test_where_nothing_is_a_sessions_own_there_is_no_salt_of_one():
    ask = Ask(session="0", tokens=(1, 2, 3), num_shared=3, max_tokens=1)
    (found,) = salted([ask], "a", SHAPE)
    assert (len(found.tokens), found.tokens[SALT_TOKENS:]) == (SALT_TOKENS + 3, (1, 2, 3))


def test_sessions_profit_from_what_they_share_only():
    asks = salted(make_load("shared-prefix", SHAPE), "salt", SHAPE)
    assert theoretical_hits(asks, 8) == [0, *[SALT_TOKENS + 64] * 4]
    unique = salted(make_load("unique", SHAPE), "salt", SHAPE)
    assert theoretical_hits(unique, 8) == [0, *[SALT_TOKENS] * 4]


def test_hits_are_whole_blocks_and_never_the_last_token():
    ask = Ask(session="0", tokens=tuple(range(32)), num_shared=0, max_tokens=1)
    assert theoretical_hits([ask, ask], 16) == [0, 31]
    assert theoretical_hits([ask, ask], 20) == [0, 20]
    assert theoretical_hits([ask, ask], 33) == [0, 0]
    shifted = Ask(session="1", tokens=(9, *range(16, 32)), num_shared=0, max_tokens=1)
    assert theoretical_hits([ask, shifted], 16) == [0, 0]


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=8)


@given(prompts, st.integers(1, 4))
def test_hits_are_those_of_the_longest_common_start(texts, block):
    asks = [Ask(session="", tokens=tuple(t), num_shared=0, max_tokens=1) for t in texts]
    hits = theoretical_hits(asks, block)
    for number, text in enumerate(texts):
        longest = 0
        for earlier in texts[:number]:
            same = next(
                (
                    n
                    for n, pair in enumerate(zip(text, earlier, strict=False))
                    if len(set(pair)) > 1
                ),
                min(len(text), len(earlier)),
            )
            longest = max(longest, same // block * block)
        assert hits[number] == min(longest, len(text) - 1)


@pytest.mark.parametrize(
    ("workload", "shape", "message"),
    [
        ("ragg", SHAPE, "workload 'ragg' is unknown; known: shared-prefix, multi-turn, rag"),
        ("rag", Shape(sessions=0), "at least 1"),
        ("rag", Shape(shared_tokens=-1), "not negative"),
        ("rag", Shape(think_s=float("nan")), "thinking for nan s"),
        ("rag", Shape(think_s=1e300), "0 to 1e\\+09 s are possible"),
        ("rag", Shape(vocabulary=7), "a vocabulary of 7 tokens; it has 30 to"),
        ("rag", Shape(vocabulary=10**30), "it has 30 to 2147483648"),
        ("multi-turn", Shape(sessions=10**14), "too large to be held in memory"),
        ("multi-turn", Shape(turns=10**6), "too large to be held in memory"),
        ("unique", Shape(output_tokens=10**30), "too large to be held in memory"),
        ("rag", Shape(documents=10**12), "too large to be held in memory"),
    ],
)
def test_what_makes_no_load_is_refused(workload, shape, message):
    with pytest.raises(ConfigError, match=message):
        make_load(workload, shape)
