"""The Transformers engine: same tokens, fewer of them computed, whatever the store does."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from transformers.cache_utils import DynamicCache

from headstart.engines.compare import NEAR_TIE_GAP, compare_tokens
from headstart.errors import ConfigError
from headstart.keys import block_keys
from headstart.types import Outcome

BLOCK = 16

# 60 prompts, 20 to 6,000 tokens, most of them short enough to be quick.
LENGTHS = [20 + 7 * i for i in range(40)] + [320 + 61 * i for i in range(17)] + [2049, 4096, 6000]


@pytest.mark.parametrize("length", LENGTHS)
def test_the_tokens_are_those_of_plain_generate(model, make_store, length, engine_for, tiny):
    assert len(LENGTHS) == 60
    store = make_store(file=None)
    tokens = tiny.random_tokens(length, seed=length)
    expected = tiny.plain_generate(model, tokens, 12)
    engine = engine_for(model, store)
    cold = engine.generate(tokens, max_new_tokens=12)
    warm = engine.generate(tokens, max_new_tokens=12)
    assert list(cold.tokens) == expected
    assert list(warm.tokens) == expected
    assert cold.hit_tokens == 0
    assert warm.hit_tokens == min(length // BLOCK * BLOCK, length - 1)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_logits_after_a_hit_are_those_of_plain_generate(model, store, block_size, engine_for, tiny):
    tokens = tiny.random_tokens(700)
    engine = engine_for(model, store, block_size=block_size)
    engine.generate(tokens, max_new_tokens=8)
    with tiny.last_logits(model) as expected:
        tiny.plain_generate(model, tokens, 8)
    with tiny.last_logits(model) as logits:
        warm = engine.generate(tokens, max_new_tokens=8)
    assert warm.hit_tokens == 700 // block_size * block_size
    assert len(logits) == len(expected) == 8
    for ours, theirs in zip(logits, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-3


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK])
def test_prompts_at_the_edges_of_a_block(model, store, length, engine_for, tiny):
    tokens = tiny.random_tokens(length, seed=9)
    engine = engine_for(model, store)
    expected = tiny.plain_generate(model, tokens, 5)
    for _ in range(2):
        answer = engine.generate(tokens, max_new_tokens=5)
        assert list(answer.tokens) == expected
    full = length // BLOCK * BLOCK
    # The last token of the prompt is always computed, and never more than that is given up.
    assert answer.hit_tokens == min(full, length - 1)
    assert sum(answer.tokens_from.values()) == answer.hit_tokens
    assert answer.computed_tokens == length - answer.hit_tokens >= 1


def test_an_empty_prompt_is_refused(model, store, engine_for):
    with pytest.raises(ConfigError, match="empty"):
        engine_for(model, store).generate([], max_new_tokens=1)


def test_a_prompt_longer_than_the_context_is_refused_and_nothing_is_lost(store, engine_for, tiny):
    model = tiny.make_model(max_position_embeddings=64)
    engine = engine_for(model, store)
    tokens = tiny.random_tokens(60)
    first = engine.generate(tokens, max_new_tokens=4)
    with pytest.raises(ConfigError, match="context of 64 tokens"):
        engine.generate(tokens, max_new_tokens=5)
    again = engine.generate(tokens, max_new_tokens=4)
    assert again.tokens == first.tokens
    assert again.hit_tokens == 48


@pytest.mark.parametrize("max_new_tokens", [0, -1])
def test_at_least_one_token_must_be_wanted(model, store, max_new_tokens, engine_for):
    with pytest.raises(ConfigError, match="max_new_tokens"):
        engine_for(model, store).generate([1, 2], max_new_tokens=max_new_tokens)


def test_a_text_prompt_needs_a_tokenizer(model, store, engine_for):
    with pytest.raises(ConfigError, match="tokenizer"):
        engine_for(model, store).generate("hello", max_new_tokens=1)


def test_generated_blocks_are_found_by_the_next_turn(model, store, engine_for, tiny):
    engine = engine_for(model, store)
    tokens = tiny.random_tokens(40)
    answer = engine.generate(tokens, max_new_tokens=50)
    assert len(answer.tokens) == 50
    # The last token was never run through the model: 89 tokens have KV, 5 full blocks of 16.
    assert answer.stored_blocks == 89 // BLOCK
    turn = [*tokens, *answer.tokens, *tiny.random_tokens(10, seed=1)]
    following = engine.generate(turn, max_new_tokens=6)
    assert following.hit_tokens == 80
    assert list(following.tokens) == tiny.plain_generate(model, turn, 6)


def test_only_blocks_that_are_not_held_are_stored(model, store, engine_for, tiny):
    engine = engine_for(model, store)
    tokens = tiny.random_tokens(10 * BLOCK)
    assert engine.generate(tokens, max_new_tokens=1).stored_blocks == 10
    assert engine.generate(tokens, max_new_tokens=1).stored_blocks == 0
    longer = tokens + tiny.random_tokens(2 * BLOCK, seed=3)
    assert engine.generate(longer, max_new_tokens=1).stored_blocks == 2


def test_tokens_are_given_out_as_they_come(model, store, engine_for, tiny):
    seen = []
    answer = engine_for(model, store).generate(
        tiny.random_tokens(30), max_new_tokens=7, on_token=seen.append
    )
    assert tuple(seen) == answer.tokens


def test_generation_stops_after_the_end_token(model, store, engine_for, tiny):
    tokens = tiny.random_tokens(50)
    expected = tiny.plain_generate(model, tokens, 8)
    stopping = tiny.make_model(eos_token_id=expected[3])
    answer = engine_for(stopping, store).generate(tokens, max_new_tokens=8)
    assert list(answer.tokens) == tiny.plain_generate(stopping, tokens, 8)
    assert answer.tokens[-1] == expected[3]
    assert len(answer.tokens) <= 4


def test_the_file_tier_serves_a_new_store(model, make_store, engine_for, tiny):
    tokens = tiny.random_tokens(500)
    with make_store() as first:
        cold = engine_for(model, first).generate(tokens, max_new_tokens=6)
        assert first.flush(timeout_s=30)
    with make_store() as second:
        warm = engine_for(model, second).generate(tokens, max_new_tokens=6)
    assert warm.tokens == cold.tokens
    assert warm.tokens_from == {"file": 496}
    assert warm.loaded_nbytes == 31 * engine_block_nbytes(model)


def engine_block_nbytes(model):
    config = model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    return BLOCK * per_token


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_and_loaded_bytes_are_the_models_own_kv(make_store, dtype, engine_for, tiny):
    model = tiny.make_model(dtype=dtype)
    tokens = tiny.random_tokens(5 * BLOCK)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.tensor([tokens]), cache=cache)
    store = make_store()
    engine = engine_for(model, store, prefill_tokens=len(tokens))
    engine.generate(tokens, max_new_tokens=1)
    store.flush(timeout_s=30)
    store.close()
    with make_store() as reopened:
        reopened.open_namespace(engine.namespace)
        with reopened.load(block_keys(engine.namespace, tokens)) as lease:
            assert lease.by_tier["file"] == lease.ready_blocks == 5
            loaded = [bytes(view) for view in lease.views]
    for block, data in enumerate(loaded):
        token = slice(block * BLOCK, (block + 1) * BLOCK)
        kv = [torch.stack([x.keys[0, :, token], x.values[0, :, token]]) for x in cache.layers]
        expected = torch.stack(kv).contiguous().view(torch.uint8).numpy().tobytes()
        assert data == expected


class StingyReservation:
    """A reservation that has fewer views than its chain has blocks."""

    def __init__(self, inner, num_missing):
        self._inner, self._num_missing = inner, num_missing
        self.views = inner.views

    def commit(self):
        return [*self._inner.commit(), *[Outcome.FULL] * self._num_missing]


class StingyStore:
    """A store that promises everything and gives `num_ready` blocks and `num_slots` slots."""

    def __init__(self, inner, *, num_ready=0, num_slots=0):
        self._inner, self._num_ready, self._num_slots = inner, num_ready, num_slots
        self.num_leases_closed = 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    @contextmanager
    def load(self, chain, *, timeout_s=None):
        with self._inner.load(chain.run(0, min(self._num_ready, len(chain)))) as lease:
            yield lease
        self.num_leases_closed += 1

    @contextmanager
    def reserve(self, chain):
        num_slots = min(self._num_slots, len(chain))
        with self._inner.reserve(chain.run(0, num_slots)) as inner:
            yield StingyReservation(inner, len(chain) - num_slots)


@pytest.mark.parametrize("num_ready", [0, 1, 3])
def test_a_short_lease_only_means_more_compute(model, filled, num_ready, engine_for, tiny):
    inner, tokens = filled
    store = StingyStore(inner, num_ready=num_ready)
    answer = engine_for(model, store).generate(tokens, max_new_tokens=5)
    assert answer.hit_tokens == num_ready * BLOCK
    assert list(answer.tokens) == tiny.plain_generate(model, tokens, 5)
    assert store.num_leases_closed == 1


@pytest.mark.parametrize("num_slots", [0, 2])
def test_a_full_store_changes_nothing(model, store, num_slots, engine_for, tiny):
    tokens = tiny.random_tokens(8 * BLOCK)
    stingy = StingyStore(store, num_ready=100, num_slots=num_slots)
    engine = engine_for(model, stingy)
    answer = engine.generate(tokens, max_new_tokens=5)
    assert answer.stored_blocks == num_slots
    assert list(answer.tokens) == tiny.plain_generate(model, tokens, 5)


def test_a_memory_smaller_than_the_prompt(model, make_store, engine_for, tiny):
    store = make_store(memory="1MiB", file=None)
    engine = engine_for(model, store)
    tokens = tiny.random_tokens(3000)
    expected = tiny.plain_generate(model, tokens, 3)
    for _ in range(2):
        answer = engine.generate(tokens, max_new_tokens=3)
        assert list(answer.tokens) == expected
    assert 0 < answer.hit_tokens < 2900


def test_a_block_larger_than_memory_is_refused_at_once(model, make_store, engine_for):
    store = make_store(memory="64KiB", file=None)
    with pytest.raises(ConfigError, match="does not fit"):
        engine_for(model, store, block_size=128)


def test_a_lease_is_closed_before_anything_is_computed(model, filled, engine_for):
    store, tokens = filled
    engine = engine_for(model, store)
    pinned = []

    def look(_token):
        pinned.append(store.discard(block_keys(engine.namespace, tokens)))

    engine.generate(tokens, max_new_tokens=1, on_token=look)
    assert pinned[0] == 6


@pytest.mark.parametrize("length", [100, 333, 900])
def test_bfloat16_is_equal_up_to_the_first_near_tie(store, length, engine_for, tiny):
    """Beside it, a control without a cache, whose prefill is split elsewhere: it may flip too."""
    model = tiny.make_model(dtype="bfloat16")
    tokens = tiny.random_tokens(length, seed=length)
    reference = engine_for(model, None).generate(tokens, max_new_tokens=16)
    control = engine_for(model, None, prefill_tokens=77).generate(tokens, max_new_tokens=16)
    engine = engine_for(model, store)
    engine.generate(tokens, max_new_tokens=16)
    warm = engine.generate(tokens, max_new_tokens=16)
    assert warm.hit_tokens > 0
    for answer in (warm, control):
        comparison = compare_tokens(
            reference.tokens,
            answer.tokens,
            top2_gaps=reference.top2_gaps,
            tie_gap=NEAR_TIE_GAP,
        )
        assert comparison.identical
