"""What is read from a config.json, and what is refused."""

from __future__ import annotations

import json

import pytest

from headstart.errors import ConfigError
from headstart.sizing.architecture import ELEMENT_BITS, LayerKind
from headstart.sizing.breakeven import PRINTED, table
from headstart.sizing.configfile import known_models, parse_model, read_model
from model_cases import LLAMA, parsed


@pytest.mark.parametrize("row", table(), ids=lambda row: row.name)
def test_the_break_even_table_worked_out_by_hand(row):
    """All its figures, as far as they are rounded there."""
    kib, seconds, rates = row.printed
    assert row.kv_kib == pytest.approx(kib, rel=0.001)
    for found, wanted in zip((*row.recompute_s, *row.break_even), (*seconds, *rates), strict=True):
        assert found == pytest.approx(wanted, rel=0.012, abs=0.006)


def test_every_model_of_the_table_comes_with_headstart():
    assert set(PRINTED) == set(known_models())


@pytest.mark.parametrize("name", known_models())
def test_every_model_names_its_source(name):
    from importlib.resources import files

    text = files("headstart.sizing.models").joinpath(f"{name}.json").read_text()
    assert len(json.loads(text)["source"]) > 20


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [("float32", 512), ("bfloat16", 256), ("float16", 256), ("fp8", 128), ("fp4", 72)],
)
def test_the_dtype_of_the_kv(dtype, nbytes):
    assert parsed().prompt_nbytes(1, dtype) == nbytes
    assert parsed().token_nbytes(dtype) == nbytes


def test_every_dtype_is_tested():
    assert len(ELEMENT_BITS) == 5


def test_latent_kv_is_on_every_rank_and_heads_are_split():
    deep, llama = read_model("deepseek-v3"), read_model("llama-3.1-8b")
    assert deep.rank_token_nbytes("bfloat16", 8) == deep.token_nbytes("bfloat16") == 70272
    assert llama.rank_token_nbytes("bfloat16", 8) * 8 == llama.token_nbytes("bfloat16")
    assert llama.rank_token_nbytes("bfloat16", 16) * 8 == llama.token_nbytes("bfloat16")
    windows = parsed(model_type="mistral", sliding_window=8)
    assert (windows.split(2), windows.split(16)) == (2.0, 2.0)  # it has two KV heads
    assert (llama.split(4), llama.split(16), deep.split(8)) == (4.0, 8.0, 1.0)


def test_windows_stop_growing():
    oss = read_model("gpt-oss-120b")
    full = float(oss.token_nbytes("bfloat16"))
    assert full * 2 == oss.token_nbytes("bfloat16", all_layers=True)
    assert oss.prompt_nbytes(1000, "bfloat16") == full * 1000 + full * 127
    assert oss.prompt_nbytes(100, "bfloat16") == full * 200


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"sliding_window": 8}, {"attention": 2}),
        ({"model_type": "mistral", "sliding_window": 8}, {"window": 2}),
        (
            {"model_type": "gemma2", "sliding_window": 8, "head_dim": 16},
            {"window": 1, "attention": 1},
        ),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            {"attention": 1, "window": 1},
        ),
        ({"model_type": "qwen2", "sliding_window": 8}, {"attention": 2}),
        (
            {
                "model_type": "jamba",
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "mamba_expand": 2,
                "mamba_d_state": 4,
                "mamba_d_conv": 4,
            },
            {"recurrent": 1, "attention": 1},
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
            {"attention": 1, "window": 1},
        ),
    ],
)
def test_which_layers_have_windows_or_states(changes, kinds):
    found = parsed(**changes)
    assert {str(layer.kind): layer.count for layer in found.layers} == kinds


def test_a_state_is_the_same_at_any_length():
    found = parsed(
        model_type="jamba",
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_expand=2,
        mamba_d_state=4,
        mamba_d_conv=4,
    )
    (state,) = (each for each in found.layers if each.kind is LayerKind.RECURRENT)
    assert state.state_nbytes == 128 * (4 + 4) * 4
    one, ten = found.prompt_nbytes(1, "bfloat16"), found.prompt_nbytes(10, "bfloat16")
    assert ten - one == 9 * found.token_nbytes("bfloat16")


def test_a_language_model_inside_another():
    found = parse_model("tiny", json.dumps({"model_type": "some_vlm", "text_config": LLAMA}))
    assert found.prompt_nbytes(1, "bfloat16") == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "new_kind"}, "not known here; known are .*llama"),
        ({"model_type": None}, "model_type is missing"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing; supply it"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"torch_dtype": None}, "dtype is missing; supply bfloat16"),
        ({"torch_dtype": "int3"}, "dtype 'int3' is unknown; allowed: float32"),
        ({"layer_types": ["full_attention"]}, "must name 2 layers .* it names 1"),
        ({"layer_types": ["full_attention", "x"]}, "not 'x'"),
        ({"model_type": "deepseek_v3"}, "qk_rope_head_dim is missing"),
        ({"active_parameters": "13B"}, "active_parameters is '13B'; supply a number"),
    ],
)
def test_what_is_missing_or_unknown_is_said(changes, message):
    with pytest.raises(ConfigError, match=message):
        parsed(**changes)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_what_is_no_config(text):
    with pytest.raises(ConfigError, match="JSON"):
        parse_model("tiny", text)


def test_active_parameters_can_be_given():
    found = parsed(active_parameters=3.3e9)
    assert (found.active_parameters, found.parameters_from) == (
        3300000000,
        "given as active_parameters",
    )


def test_a_folder_will_do(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_model(str(tmp_path)).prompt_nbytes(1, "bfloat16") == 256
    with pytest.raises(ConfigError, match=r"neither a readable config.json.* llama-3.1-8b"):
        read_model(str(tmp_path / "missing"))


def test_a_longer_context_than_the_models_is_refused():
    with pytest.raises(ConfigError, match=r"at most 1024 .* give a config.json with"):
        parsed().check_tokens(1025)
