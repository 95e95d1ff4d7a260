"""Models that are refused when the engine is made, and some that are not."""

from __future__ import annotations

import pytest
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from headstart.errors import ConfigError, UnsupportedModelError


def _tiny(config_class, model_class, **fields):
    return model_class(config_class(**fields)).eval()


def _mistral(**changes):
    return _tiny(
        MistralConfig,
        MistralForCausalLM,
        vocab_size=100,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        **changes,
    )


def _t5():
    return _tiny(
        T5Config,
        T5ForConditionalGeneration,
        vocab_size=100,
        d_model=32,
        d_kv=16,
        d_ff=32,
        num_layers=1,
        num_heads=2,
    )


def _quantised(tiny):
    model = tiny.make_model()
    model.generation_config.cache_implementation = "quantized"
    return model


def _dynamic_rope(tiny):
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return tiny.make_model(rope_parameters=parameters)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda tiny: _mistral(sliding_window=16), "Sliding"),
        (
            lambda tiny: tiny.make_model(
                layer_types=["full_attention", "sliding_attention", "full_attention"],
                sliding_window=8,
            ),
            "Sliding",
        ),
        (lambda tiny: _t5(), "encoder"),
        (_quantised, "quantized"),
        (_dynamic_rope, "dynamic"),
    ],
    ids=["sliding", "hybrid", "encoder-decoder", "quantised", "dynamic-rope"],
)
def test_a_model_that_cannot_be_cached_is_refused(store, make, reason, engine_for, tiny):
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        engine_for(make(tiny), store)
    assert "\n" not in str(caught.value)


def test_a_recurrent_model_is_refused(store, engine_for):
    model = _tiny(
        MambaConfig, MambaForCausalLM, vocab_size=100, hidden_size=16, num_hidden_layers=1
    )
    with pytest.raises(UnsupportedModelError):
        engine_for(model, store)


def test_a_model_in_training_mode_is_refused(store, engine_for, tiny):
    with pytest.raises(ConfigError, match="eval"):
        engine_for(tiny.make_model().train(), store)


def _gpt2():
    return _tiny(
        GPT2Config,
        GPT2LMHeadModel,
        vocab_size=100,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=512,
        eos_token_id=None,
        bos_token_id=None,
    )


@pytest.mark.parametrize("make", [lambda: _mistral(sliding_window=None), _gpt2])
def test_other_plain_models_work(store, make, engine_for, tiny):
    model = make()
    tokens = [token % 99 + 1 for token in tiny.random_tokens(150)]
    engine = engine_for(model, store)
    engine.generate(tokens, max_new_tokens=6)
    warm = engine.generate(tokens, max_new_tokens=6)
    assert warm.hit_tokens == 144
    assert list(warm.tokens) == tiny.plain_generate(model, tokens, 6)
