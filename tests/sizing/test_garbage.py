"""Whatever a config.json or a hardware file says: an answer or a clear error, no traceback."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.errors import ConfigError
from headstart.sizing.configfile import parse_model, read_model
from headstart.sizing.hardware import look_up, read_hardware
from headstart.sizing.prefill import engine_costs
from model_cases import LLAMA, parsed

BAD = (-1, 0, "8", 1.5, True, [8], {"a": 1}, 10**13, float("nan"))
NEEDED = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"),
    *("intermediate_size", "num_key_value_heads", "head_dim"),
)
JAMBA = {
    "model_type": "jamba",
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_expand": 2,
    "mamba_d_state": 4,
    "mamba_d_conv": 4,
}
MOE = {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("field", NEEDED)
def test_no_whole_number_where_one_must_be(field):
    for value in BAD:
        with pytest.raises(ConfigError, match=rf"{field} is .*; it must be a whole number"):
            parsed(**{field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; at most 10000"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, no multiple of num_key_value_"),
        ({"hidden_size": 65}, "head_dim is missing; supply it: .* 65 / 4"),
        ({"model_type": 3}, "model_type is 3, no text"),
        ({"torch_dtype": ["x"]}, "dtype .* is unknown"),
        ({"dtype": {"a": 1}}, "dtype .* is unknown"),
        ({"layer_types": 3}, "must name 2 layers"),
        ({"layer_types": "full_attention"}, "must name 2 layers"),
        ({"layer_types": {"a": 1}}, "must name 2 layers"),
        ({"model_type": "mistral", "sliding_window": "8"}, "sliding_window is '8'"),
        ({"model_type": "mistral", "sliding_window": -8}, "sliding_window is -8"),
        ({"active_parameters": True}, "active_parameters is True"),
        ({"active_parameters": -3}, "active_parameters is -3"),
        ({"active_parameters": float("inf")}, "active_parameters is inf"),
        ({**JAMBA, "attn_layer_offset": "1"}, "attn_layer_offset is '1'"),
        ({**JAMBA, "attn_layer_offset": None}, "attn_layer_offset is missing"),
        ({**MOE, "mlp_only_layers": "x"}, "mlp_only_layers must be a list"),
        ({**MOE, "num_experts": "4"}, "num_experts is '4'"),
    ],
)
def test_what_cannot_be_is_said(changes, message):
    with pytest.raises(ConfigError, match=message):
        parsed(**changes)


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, "num_key_value_heads"),
        ({"model_type": "mistral"}, "sliding_window"),
        ({"model_type": "gemma2", "head_dim": 16}, "sliding_window"),
        ({"model_type": "qwen3"}, "head_dim"),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True},
            "max_window_layers",
        ),
    ],
)
def test_what_transformers_would_fill_in_by_a_models_size_is_asked_for(changes, left_out):
    """Mistral's default of 8 KV heads, say, is that of its 7B model."""
    config = {name: value for name, value in {**LLAMA, **changes}.items() if name != left_out}
    with pytest.raises(ConfigError, match=f"{left_out} is missing; supply it"):
        parse_model("tiny", json.dumps(config))


def test_a_window_of_null_is_none_and_llamas_kv_heads_are_its_heads():
    nothing = parse_model(
        "tiny", json.dumps({**LLAMA, "model_type": "mistral", "sliding_window": None})
    )
    assert [str(each.kind) for each in nothing.layers] == ["attention"]
    alike = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert parse_model("tiny", json.dumps(alike)).token_nbytes("bfloat16") == 512


@pytest.mark.parametrize("name", ["text_config", "language_config", "llm_config"])
def test_the_language_model_inside_another(name):
    outer = {"model_type": "vlm", name: dict(LLAMA), "active_parameters": 5e9}
    inner = outer[name]
    outer["dtype"] = inner.pop("torch_dtype")
    found = parse_model("tiny", json.dumps({"model_type": "omni", "thinker_config": outer}))
    assert found.token_nbytes(found.dtype) == 256
    assert found.active_parameters == 5_000_000_000


@pytest.mark.parametrize(
    ("quantized", "dtype"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "bfloat16"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 8, "type": "float"},
                        "input_activations": {"num_bits": 8, "type": "float"},
                    }
                },
            },
            "fp8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            "bfloat16",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}}, "bfloat16"),
        ("fp8", "bfloat16"),
        ([1], "bfloat16"),
    ],
)
def test_in_what_the_weights_are_multiplied(quantized, dtype):
    """4 bits alone are unpacked to 16; a name that is not known is no reason to think it faster."""
    assert parsed(quantization_config=quantized).weights_dtype == dtype


def test_layers_of_a_mixture_that_are_none():
    mixture = parsed(**MOE)
    some = parsed(**MOE, num_hidden_layers=2, mlp_only_layers=[0])
    other = parsed(**MOE, decoder_sparse_step=2)
    assert some.active_parameters == other.active_parameters != mixture.active_parameters


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "null", "[]", '"x"', "{}", "[" * 100_000, '{"text_config":' * 3000),
        '{"num_hidden_layers": ' + "9" * 5000 + "}",
        '{"model_type": "llama", "num_hidden_layers": ' + "9" * 4000 + "}",
    ],
)
def test_no_config_at_all(text):
    with pytest.raises(ConfigError) as error:
        parse_model("tiny", text)
    assert len(str(error.value)) < 1200


def test_files_with_a_byte_order_mark(tmp_path):
    config, hardware = tmp_path / "config.json", tmp_path / "hardware.toml"
    config.write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    hardware.write_text("num_gpus = 2", encoding="utf-8-sig")
    assert read_model(str(config)).max_tokens == 1024
    assert read_hardware(hardware).num_gpus == 2


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats() | st.text("a8[", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a8[", max_size=4), inner),
    max_leaves=4,
)
FIELDS = st.sampled_from(
    [
        *(*NEEDED, "model_type", "dtype", "torch_dtype", "layer_types", "sliding_window"),
        *("sliding_window_pattern", "use_sliding_window", "max_window_layers", "text_config"),
        *("quantization_config", "active_parameters", "num_experts", "num_experts_per_tok"),
        *("n_shared_experts", "first_k_dense_replace", "kv_lora_rank", "qk_rope_head_dim"),
        *("mlp_only_layers", "full_attention_interval", "linear_num_value_heads", "name"),
    ]
)
KINDS = st.sampled_from(["llama", "mistral", "gemma2", "qwen2", "qwen3_next", "deepseek_v3"])


@given(KINDS, st.dictionaries(FIELDS, VALUES, max_size=4))
def test_any_values_give_an_answer_or_an_error(kind, changes):
    with contextlib.suppress(ConfigError):
        found = parse_model("tiny", json.dumps({**LLAMA, "model_type": kind, **changes}))
        assert found.prompt_nbytes(100, "bfloat16") >= 0
        assert found.prefill_flops(0, 100) > 0


# ---------------------------------------------------------------------------------------- hardware

DRIVE = "[drive]\nread_bytes_per_s = 7e9\nwrite_bytes_per_s = 7e9\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[network]\nbytes_per_s = 0.0", "network bytes_per_s is 0; supply a finite number"),
        ("[network]\nbytes_per_s = nan", "network bytes_per_s is nan"),
        ("[network]\nbytes_per_s = 1e10\nefficiency = 0.0", "network efficiency is 0; supply"),
        (
            "[network]\nbytes_per_s = 1e10\nlatency_s = inf",
            "network latency_s is inf; supply seconds",
        ),
        (DRIVE + "latency_s = -1.0", "drive latency_s is -1; supply seconds"),
        (
            DRIVE + "latency_s = 80.0",
            "drive latency_s is 80; supply seconds, such as 80e-6 for 80 us",
        ),
        ("[drive]\nread_bytes_per_s = 7.0\nwrite_bytes_per_s = 7.0", "in bytes a second; 7 GB/s"),
        ('[drive]\nread_bytes_per_s = "7GB"\nwrite_bytes_per_s = 7e9', "Expected `float`"),
        ("read_bytes_per_s = 10.3", "read_bytes_per_s is 10.3, in bytes a second"),
        ("write_bytes_per_s = 0.0", "write_bytes_per_s is 0"),
        ('[gpu]\nname = "x"\nflops = { bf16 = 989.0 }', "989 TFLOPS, say, are 989e12"),
        ('[gpu]\nname = "x"\nflops = { bf16 = 9e14, int8 = 2e15 }', "'int8'"),
        ('[gpu]\nname = "x"\nflops = {}', "flops must have bf16"),
        ("storage_month = 0.0", "storage_month is 0; .* or leave it out"),
        ("gpu_hour = nan", "gpu_hour is nan; .* or leave it out"),
        ('staging = "0GiB"', "staging is '0GiB'; supply a size such as 512GiB"),
        ('staging = "lots"', "staging: 'lots' is not a quantity"),
        ("staging = 5", "Expected `str`"),
        ("num_ports = 2", "num_ports is 2, and there is no network; name one"),
        ("num_gpus = -8", "num_gpus is -8; it must be at least 1"),
        (f"num_engines = {10**18}", "at most 1000000"),
        ("num_gpus = 8\nnum_gpus = 4", "hardware file"),
        ("block_s = nan", "block_s is nan; supply seconds"),
        ("[link]\nbytes_per_s = 5e10\nefficiency = 1.1", "link efficiency is 1.1"),
    ],
)
def test_hardware_that_cannot_be(tmp_path, text, message):
    path = tmp_path / "hardware.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        engine_costs(read_model("llama-3.1-8b"), look_up(read_hardware(path)))
