"""SmolLM2 end to end: the model of the demo gives the same tokens with the cache as without."""

from __future__ import annotations

import pytest

from headstart import config
from headstart.demo.questions import Chat, chapter, document
from headstart.engines.compare import compare_tokens, tie_gap
from headstart.engines.smollm2 import load_model, prepare_model
from headstart.engines.transformers import CachedModel

# The first test of a machine converts the model, which takes half a minute.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
TOKENS = 12


@pytest.fixture(scope="module")
def loaded():
    return load_model(prepare_model(config.cache_dir(), "float32"))


@pytest.fixture
def big_store(make_store):
    return make_store(memory="256MiB", file="256MiB")


@pytest.mark.parametrize("length", [20, 33, 250, 700, 1500])
def test_float32_tokens_are_those_of_plain_generate(loaded, big_store, tiny, length):
    model, tokenizer = loaded
    tokens = tokenizer(document())["input_ids"][-length:]
    expected = tiny.plain_generate(model, tokens, TOKENS)
    engine = CachedModel(model, tokenizer, big_store)
    cold = engine.generate(tokens, max_new_tokens=TOKENS)
    with tiny.last_logits(model) as logits:
        warm = engine.generate(tokens, max_new_tokens=TOKENS)
    assert list(cold.tokens) == list(warm.tokens) == expected
    assert warm.hit_tokens == length // 32 * 32
    assert warm.text == tokenizer.decode(expected, skip_special_tokens=True)
    with tiny.last_logits(model) as plain:
        tiny.plain_generate(model, tokens, 1)
    assert (logits[0] - plain[0]).abs().max() < 1e-3


def test_a_text_prompt_in_a_new_store_comes_from_the_file_tier(loaded, make_store):
    model, tokenizer = loaded
    prompt = chapter("CHAPTER 6.")
    with make_store(memory="128MiB", file="128MiB") as first:
        cold = CachedModel(model, tokenizer, first).generate(prompt, max_new_tokens=TOKENS)
        assert first.flush(timeout_s=60)
    with make_store(memory="128MiB", file="128MiB") as second:
        warm = CachedModel(model, tokenizer, second).generate(prompt, max_new_tokens=TOKENS)
    assert warm.tokens == cold.tokens
    assert warm.tokens_from == {"file": cold.prompt_tokens // 32 * 32}


def test_a_chat_finds_the_blocks_of_its_own_answers(loaded, big_store, tiny):
    model, tokenizer = loaded
    engine = CachedModel(model, tokenizer, big_store, block_size=16)
    chat = Chat(tokenizer=tokenizer, text=chapter("CHAPTER 13."))
    for question in ("Who wrote this book?", "And when?", "Thank you."):
        known = len(chat.tokens)
        prompt = chat.ask(question)
        answer = engine.generate(prompt, max_new_tokens=40)
        assert list(answer.tokens) == tiny.plain_generate(model, prompt, 40)
        # All full blocks of the turns before, but for the last answer's last token.
        assert answer.hit_tokens >= max(0, known - 1) // 16 * 16
        chat.hear(answer.tokens)


def test_the_continued_chat_is_what_the_template_makes(loaded):
    _, tokenizer = loaded
    chat = Chat(tokenizer=tokenizer, text="A text.")
    chat.ask("First?")
    chat.hear((*tokenizer("An answer.")["input_ids"], tokenizer.eos_token_id))
    continued = tokenizer.decode(chat.ask("Second?"))
    messages = [
        {"role": "system", "content": "."},
        {"role": "user", "content": "A text.\n\nQuestion: First?"},
        {"role": "assistant", "content": "An answer."},
        {"role": "user", "content": "Second?"},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    user = "<|im_start|>user"
    assert continued[continued.index(user) :] == whole[whole.index(user) :]


def test_bfloat16_is_equal_up_to_the_first_near_tie(big_store):
    model, tokenizer = load_model(prepare_model(config.cache_dir(), "bfloat16"))
    tokens = tokenizer(document())["input_ids"][:300]
    reference = CachedModel(model, tokenizer).generate(tokens, max_new_tokens=TOKENS)
    engine = CachedModel(model, tokenizer, big_store)
    engine.generate(tokens, max_new_tokens=TOKENS)
    warm = engine.generate(tokens, max_new_tokens=TOKENS)
    assert warm.hit_tokens == 288
    comparison = compare_tokens(
        reference.tokens,
        warm.tokens,
        top2_gaps=reference.top2_gaps,
        tie_gap=tie_gap("bfloat16"),
    )
    assert comparison.identical
