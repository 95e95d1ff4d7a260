"""KV bytes as computed from a config, against the tensors of tiny random models."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from headstart.sizing.configfile import parse_model

pytestmark = pytest.mark.engine

TINY = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def built(kind, **fields):
    """A random model, and the architecture that its own config.json describes."""
    config = getattr(transformers, f"{kind}Config")(**{**TINY, **fields})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    text = json.dumps(
        {"torch_dtype": "float32", **json.loads(config.to_json_string(use_diff=False))}
    )
    return model, parse_model(kind, text)


def cached_nbytes(model, num_tokens):
    """Of all tensors of keys and values after a prefill and one more token."""
    tokens = torch.arange(num_tokens)[None] % 100
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
    tensors = [each for layer in cache.layers for each in (layer.keys, layer.values)]
    return sum(each.numel() * each.element_size() for each in tensors)


@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_grouped_queries(num_tokens):
    model, found = built("Llama", num_hidden_layers=3, num_key_value_heads=2)
    assert found.prompt_nbytes(num_tokens, "float32") == cached_nbytes(model, num_tokens)
    assert found.token_nbytes("float32") * num_tokens == cached_nbytes(model, num_tokens)


@pytest.mark.parametrize("num_tokens", [3, 15, 16, 40])
def test_windows_of_some_layers(num_tokens):
    model, found = built(
        "Gemma2",
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    assert found.prompt_nbytes(num_tokens, "float32") == cached_nbytes(model, num_tokens)


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_windows_of_all_layers(num_tokens):
    model, found = built(
        "Mistral", num_hidden_layers=2, num_key_value_heads=1, sliding_window=16, head_dim=16
    )
    assert found.prompt_nbytes(num_tokens, "float32") == cached_nbytes(model, num_tokens)
    assert found.token_nbytes("float32") == 0


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_latent_keys_and_values(num_tokens):
    """Transformers caches what it makes of them; engines keep what the projection gives."""
    model, found = built(
        "DeepseekV3",
        num_hidden_layers=2,
        num_key_value_heads=4,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )
    nbytes = []
    for layer in model.model.layers:
        layer.self_attn.kv_a_proj_with_mqa.register_forward_hook(
            lambda _module, _given, latent: nbytes.append(latent.numel() * latent.element_size())
        )
    cached_nbytes(model, num_tokens)
    assert found.prompt_nbytes(num_tokens, "float32") == sum(nbytes)


def test_recurrent_layers_keep_a_state_whatever_the_length():
    model, found = built(
        "Qwen3Next",
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
    tensors = []
    for layer in cache.layers:
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            each = getattr(layer, name, None)
            tensors += [each] if isinstance(each, torch.Tensor) else list((each or {}).values())
    assert found.prompt_nbytes(20, "float32") == sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize(
    ("kind", "fields", "chosen"),
    [
        ("Llama", {"num_hidden_layers": 3, "num_key_value_heads": 2}, 1.0),
        (
            "Mixtral",
            {"num_hidden_layers": 2, "num_key_value_heads": 2, "num_local_experts": 4},
            2 / 4,
        ),
        (
            "Qwen3Next",
            {
                "num_hidden_layers": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
                "num_experts": 4,
                "num_experts_per_tok": 2,
            },
            2 / 4,
        ),
        (
            "Jamba",
            {
                "num_hidden_layers": 8,
                "num_key_value_heads": 2,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "use_mamba_kernels": False,
            },
            2 / 4,
        ),
    ],
)
def test_active_parameters_are_those_of_the_projections(kind, fields, chosen):
    model, found = built(kind, **fields)
    # Norms, biases and the decay of states are no multiplications with all of a token.
    left_out = ("norm", "bias", "A_log", ".D")
    counted = sum(
        weights.numel() * (chosen if ".experts." in name else 1)
        for name, weights in model.model.layers.named_parameters()
        if not any(word in name for word in left_out)
    )
    assert found.active_parameters == counted
