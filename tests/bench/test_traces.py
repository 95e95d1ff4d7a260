"""Loads from traces: what hits what, however they are cut; and the values of the real ones."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from headstart.bench import load
from headstart.bench.load import SALT_TOKENS, Shape, fingerprint, salted, theoretical_hits
from headstart.bench.traces import Cut, asks_of, load_trace
from headstart.errors import ConfigError
from headstart.traces.files import open_trace
from trace_cases import MLCOMMONS, MOONCAKE, TOKEN_IDS, WEKA, lines

SHAPE = Shape(seed=3)
TWIN = [
    (0, 20, [0, 1, 2]),
    (40, 16, [0, 1]),
    (40, 24, [0, 3, 4]),
    (900, 24, [0, 3, 5]),
    (950, 3, [6]),
    (1900, 24, [0, 3, 5]),
]
"""A made-up trace in Mooncake's form, with blocks of 8 tokens: time, length, ids."""
TWIN_HITS = [0, 16, 8, 16, 0, 24]
"""Tokens in blocks that are known; the last of a prompt is always computed."""


@pytest.fixture
def file(tmp_path):
    def write(rows):
        path = tmp_path / "trace.jsonl"
        path.write_bytes(lines(rows))
        return path

    return write


@pytest.fixture
def twin(file):
    keys = ("timestamp", "input_length", "hash_ids")
    return file([{"output_length": 4, **dict(zip(keys, row, strict=True))} for row in TWIN])


def expected(hits, asks):
    return [min(hit, len(ask.tokens) - 1) for hit, ask in zip(hits, asks, strict=True)]


def loaded(path, workload="trace", shape=SHAPE, **cut):
    return load_trace(workload, path, Cut(**cut), shape)


def test_equal_ids_are_equal_tokens_and_others_are_not(twin):
    asks = loaded(twin, block_size=8)
    assert [len(ask.tokens) for ask in asks] == [20, 16, 24, 24, 3, 24]
    blocks: dict[int, set] = {}
    for ask, (_, _, ids) in zip(asks, TWIN, strict=True):
        for index, each in enumerate(ids):
            blocks.setdefault(each, set()).add(ask.tokens[8 * index : 8 * index + 8])
    assert all(len(texts) == 1 for texts in blocks.values())
    assert len(set.union(*blocks.values())) == len(blocks)
    assert theoretical_hits(asks, 8) == expected(TWIN_HITS, asks)
    assert loaded(twin, block_size=8) == asks
    assert fingerprint(loaded(twin, block_size=8, shape=Shape(seed=4))) != fingerprint(asks)
    assert [ask.at_s for ask in asks] == [0.0, 0.04, 0.04, 0.9, 0.95, 1.9]
    assert all(999 < token < 30_000 for ask in asks for token in ask.tokens)


def test_a_run_has_a_salt_in_front_and_sessions_have_none(twin):
    asks = loaded(twin, block_size=8)
    one, other = (salted(asks, salt, SHAPE) for salt in ("a", "b"))
    assert [ask.tokens[SALT_TOKENS:] for ask in one] == [ask.tokens for ask in asks]
    assert len({ask.tokens[:SALT_TOKENS] for ask in one}) == 1
    hits = theoretical_hits([*one, *other], SALT_TOKENS)
    with_salt = [0, *(SALT_TOKENS + hit for hit in TWIN_HITS[1:])]
    assert hits[:6] == expected(with_salt, one)
    assert hits[6] == 0, "no run profits from another"


@pytest.mark.parametrize("factor", [0.5, 0.125, 0.01])
def test_shrunk_prompts_hit_what_they_hit_before(twin, factor):
    asks = loaded(twin, block_size=8, scale_tokens=factor)
    block = max(1, round(8 * factor))
    assert [len(ask.tokens) for ask in asks][1] == 2 * block
    hits = [hit // 8 * block for hit in TWIN_HITS]
    assert theoretical_hits(asks, block) == expected(hits, asks)
    assert {ask.max_tokens for ask in asks} == {max(1, round(4 * factor))}


def test_shrunk_blocks_stay_different_among_those_that_follow_one(file):
    rows = [
        {"timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [0, 1 + number]}
        for number in range(600)
    ]
    asks = loaded(file(rows), block_size=8, scale_tokens=0.1, shape=Shape(vocabulary=1000))
    assert len({ask.tokens for ask in asks}) == 600
    assert len({ask.tokens[0] for ask in asks}) == 1
    with pytest.raises(ConfigError, match="raise --scale-tokens or --vocabulary"):
        loaded(file(rows), block_size=8, scale_tokens=0.1, shape=Shape(vocabulary=500))


def test_a_cut_takes_the_first_and_what_is_not_too_long(twin, file):
    assert len(loaded(twin, block_size=8, limit=2)) == 2
    short = loaded(twin, block_size=8, max_prompt_tokens=20 + SALT_TOKENS)
    assert [len(ask.tokens) for ask in short] == [20, 16, 3]
    short = loaded(twin, block_size=8, max_prompt_tokens=16 + SALT_TOKENS, limit=1)
    assert [len(ask.tokens) for ask in short] == [16], "the first that are kept"
    assert [ask.at_s for ask in loaded(twin, block_size=8, time_scale=2.0)][3] == 1.8
    with pytest.raises(ConfigError, match=r"nothing is left .* raise --max-prompt-tokens"):
        loaded(twin, block_size=8, max_prompt_tokens=SALT_TOKENS)
    weka = file([WEKA, {**WEKA, "id": "two"}])
    asks = loaded(weka, "agentic", max_prompt_tokens=12 + SALT_TOKENS)
    assert [(ask.session, ask.turn) for ask in asks] == [
        ("one", 0),
        ("one/2", 0),
        ("two", 0),
        ("two/2", 0),
    ], "a session ends before what is too long"
    assert {ask.session for ask in loaded(weka, "agentic", limit=1)} == {"one", "one/2"}


def test_sessions_of_agents_grow_and_pause(file):
    weka = file([WEKA])
    asks = loaded(weka, "agentic", time_scale=0.5)
    mine = [ask for ask in asks if ask.session == "one"]
    assert [ask.think_s for ask in mine] == [0.0, 3.0, 1.5]
    assert mine[1].tokens[:8] == mine[0].tokens[:8] == mine[2].tokens
    assert mine[1].tokens[8] != mine[0].tokens[8]
    assert theoretical_hits(asks, 4) == [0, 0, 8, 7]
    assert {ask.think_s for ask in loaded(weka)} == {0.0}
    asks = loaded(file(MLCOMMONS), "agentic")
    assert [(ask.session, ask.think_s) for ask in asks] == [("c", 0.0), ("c", 1.5), ("d", 0.0)]
    assert asks[1].tokens[:5] == asks[0].tokens
    assert asks[2].tokens[:2] == asks[0].tokens[:2]


def test_token_ids_are_sent_as_they_are_where_they_fit(file):
    path = file(TOKEN_IDS)
    asks = loaded(path)
    assert asks[0].tokens == tuple(range(20))
    assert theoretical_hits(loaded(path, scale_tokens=0.5), 8) == [0, 8]
    rows = [{**TOKEN_IDS[0], "input_tok_ids": [99_999, 5, 99_999]}]
    first, second, third = loaded(file(rows))[0].tokens
    assert (first == third, second, first < 30_000) == (True, 5, True)
    assert loaded(file(rows), shape=Shape(vocabulary=128_000))[0].tokens[0] == 99_999


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ({"scale_tokens": 0.0}, "more than 0 and at most 1: 0.0"),
        ({"scale_tokens": 1.5}, "more than 0 and at most 1: 1.5"),
        ({"scale_tokens": float("nan")}, "more than 0 and at most 1: nan"),
        ({"time_scale": -1.0}, "times cannot be scaled by -1.0"),
        ({"time_scale": float("inf")}, "times cannot be scaled by inf"),
        ({"time_scale": 1e300}, "times cannot be scaled by 1e"),
        ({"limit": 0}, "limit is at least 1"),
    ],
)
def test_a_cut_that_is_none_is_refused(cut, message):
    with pytest.raises(ConfigError, match=message):
        Cut(**cut)


def test_what_makes_no_load_is_refused(file):
    with pytest.raises(ConfigError, match="a trace of Mooncake knows no sessions"):
        loaded(file(MOONCAKE), "agentic")
    with pytest.raises(ConfigError, match="'rag' is not read from a trace"):
        loaded(file(MOONCAKE), "rag")
    with pytest.raises(ConfigError, match="a vocabulary of 7 tokens"):
        loaded(file(MOONCAKE), shape=Shape(vocabulary=7))


def test_a_trace_that_cannot_be_held_is_refused(file, monkeypatch):
    monkeypatch.setattr(load, "MAX_TOKENS", 40)
    assert len(loaded(file(MOONCAKE[:2]), block_size=8)) == 2
    with pytest.raises(ConfigError, match="too large to be held in memory"):
        loaded(file(MOONCAKE), block_size=8)


# ------------------------------------------------------------------- the real ones, where they are

TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "traces"


def real(name):
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"NOT CHECKED against a real trace: {path} is not there")
    return path


@pytest.mark.parametrize(
    ("name", "rate"), [("conversation", 0.3736), ("synthetic", 0.6512)], ids=str
)
def test_the_known_hit_rates_of_mooncakes_traces_come_out(name, rate):
    path = real(f"mooncake_{name}_trace.jsonl.gz")
    known: set[str] = set()
    num_tokens = num_hit = 0
    for (request,) in open_trace(path).sessions:
        is_hit = True
        for key, count in request.pieces:
            is_hit = is_hit and key in known
            known.add(key)
            num_tokens += count
            num_hit += count * is_hit
    assert num_hit / num_tokens == pytest.approx(rate, abs=5e-5)
    # And of the prompts that are sent, with 4 tokens for each 512: whole blocks, rounded tails.
    asks = loaded(path, scale_tokens=1 / 128)
    sent = sum(theoretical_hits(asks, 4)) / sum(len(ask.tokens) for ask in asks)
    assert sent == pytest.approx(rate, abs=0.003)


def test_the_known_hit_rate_of_token_ids_comes_out():
    asks = loaded(real("sharegpt_llama31_token_ids_300.jsonl.gz"))
    rate = sum(theoretical_hits(asks, 16)) / sum(len(ask.tokens) for ask in asks)
    assert rate == pytest.approx(0.076, abs=5e-4)


def test_a_real_session_of_an_agent_hits_what_its_ids_say():
    sessions = list(islice(open_trace(real("weka_claude_code_sample_39.tar.gz")).sessions, 3))
    asks = list(asks_of(sessions, Cut(scale_tokens=1 / 16), SHAPE, with_pauses=True))
    known: set[str] = set()
    hits = []
    for request in (each for session in sessions for each in session):
        hit, is_hit = 0, True
        for key, count in request.pieces:
            is_hit = is_hit and key in known and count == 64
            known.add(key)
            hit += 4 * is_hit
        hits.append(hit)
    assert theoretical_hits(asks, 4) == expected(hits, asks)
    assert sum(ask.think_s for ask in asks) > 0.0


def test_real_conversations_of_agents_share_their_system_prompt():
    asks = loaded(real("mlcommons_agentic_coding_2.5h.jsonl.gz"), "agentic", limit=2)
    one, two = {ask.session: ask for ask in reversed(asks)}.values()
    assert one.session != two.session
    assert one.tokens[:20] == two.tokens[:20]
