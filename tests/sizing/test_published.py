"""Three machines by hand, and what others have published."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from headstart.sizing import reference
from headstart.sizing.architecture import LayerKind
from headstart.sizing.configfile import parse_model, read_model
from headstart.sizing.hardware import Gpu, Hardware, look_up
from headstart.sizing.load import Load
from headstart.sizing.plan import make_plan
from headstart.sizing.prefill import engine_costs
from headstart.sizing.sizing import Sizing

PCIE5 = 63.0e9 * 0.87
H100 = 989.4e12 * 0.5
TOKENS = 32_768

# The language model's part of Gemma 3 27B; widths of its projections as Google prints them ("Gemma
# explained: what's new in Gemma 3": 5376 -> 4096 queries, 2048 keys, 62 layers, 5 of 6 windows).
GEMMA = {
    "model_type": "gemma3",
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
    },
}


def sizing(model, hardware, **load):
    machine = look_up(hardware)
    asked = Load(**{"contexts": ((TOKENS, 1.0),), "concurrency": 8, **load})
    return Sizing(model, machine, asked, engine_costs(model, machine))


def answers(model, hardware, **load):
    plan = make_plan(sizing(model, hardware, **load))
    return {each.key: each for each in plan.answers}


# ------------------------------------------------------------------------------------------ by hand


def test_llama_70b_on_eight_h100_and_an_array_behind_200_gbe():
    array = Hardware(num_gpus=8, drive="nvme-gen4", num_drives=4, network="200gbe")
    found = answers(read_model("llama-3.1-70b"), array)
    # 80 layers, 8 heads of 128 for keys and for values, 2 bytes; all tokens but the last.
    loaded = (TOKENS - 1) * 80 * 2 * 8 * 128 * 2
    read = min(4 * 7e9 * 0.77, 25e9 * 0.82)
    assert read == 20.5e9  # the port, not the drives
    flops = 2 * 70.6e9 * TOKENS + 4 * 80 * 64 * 128 * TOKENS**2 / 2
    compute_s = 4 * 0.005 + flops / (8 * H100)  # 4 steps of 8,192 tokens
    rest_s = 0.005 + (2 * 70.6e9 + 4 * 80 * 64 * 128 * TOKENS) / (8 * H100)
    copy_s = loaded / (8 * PCIE5)
    assert found["prefill_s"].value == pytest.approx(compute_s) == pytest.approx(1.54, abs=0.01)
    load_s = 1.2e-4 + loaded / read + copy_s + rest_s
    assert found["load_s"].value == pytest.approx(load_s, rel=1e-4) == pytest.approx(0.55, abs=0.01)
    even = loaded / (compute_s - rest_s - 1.2e-4 - copy_s)
    assert found["break_even_bytes_per_s"].value == pytest.approx(even, rel=1e-4)
    assert even == pytest.approx(8 * 0.88e9, rel=0.03)  # as in the table of one GPU, times eight
    assert found["engines_fed"].value == found["flip_concurrency"].value == 2
    assert found["staging_nbytes"].value == 8 * loaded
    # All at once: the reads share the port, then one step copies and computes what is left.
    assert found["hit_ttft_burst_worst_s"].value == pytest.approx(
        1.2e-4 + 8 * (loaded / read + copy_s + rest_s - 0.005) + 0.005, rel=1e-3
    )


def test_deepseek_v3_on_eight_h200_loads_little_but_on_every_rank():
    found = answers(read_model("deepseek-v3"), Hardware(gpu="h200", num_gpus=8))
    loaded = (TOKENS - 1) * 61 * (512 + 64) * 2
    # In FP8, but attention in BF16: 128 heads, keys of 128 + 64, values of 128.
    tokens_s = 2 * 37e9 * TOKENS / (8 * 2 * H100)
    pairs_s = 4 * 61 * 128 * (192 + 128) / 2 * TOKENS**2 / 2 / (8 * H100)
    assert found["prefill_s"].value == pytest.approx(4 * 0.005 + tokens_s + pairs_s, rel=1e-3)
    # Each rank needs all of it: eight links are as fast as one.
    assert found["link_bytes_per_s"].value == pytest.approx(PCIE5)
    assert found["kv_token_rank_nbytes"].value == found["kv_token_nbytes"].value == 70272
    copied_s = loaded / PCIE5
    assert found["memory_hit_s"].value == pytest.approx(copied_s + 0.005, rel=0.01)
    assert found["load_s"].value == pytest.approx(loaded / 7e9 + copied_s + 0.005, rel=0.01)


def test_gemma_3_grows_by_its_ten_full_layers_only():
    model = parse_model("gemma", json.dumps(GEMMA))
    assert {each.kind: each.count for each in model.layers} == {
        LayerKind.WINDOW: 52,
        LayerKind.ATTENTION: 10,
    }
    a_layer = 2 * 16 * 128 * 2
    assert model.token_nbytes("bfloat16") == 10 * a_layer
    assert model.prompt_nbytes(TOKENS, "bfloat16") == (10 * TOKENS + 52 * 1023) * a_layer
    assert model.prompt_nbytes(TOKENS, "fp8") == model.prompt_nbytes(TOKENS, "bfloat16") // 2
    attention = 5376 * (4096 + 2048 + 2048) + 4096 * 5376
    assert model.active_parameters == 62 * (attention + 3 * 5376 * 21504)
    # A token attends to 1,024 in a window, to all before it in the others.
    assert model.prefill_flops(TOKENS - 1, 1) == pytest.approx(
        2 * model.active_parameters + 4 * 32 * 128 * (52 * 1024 + 10 * TOKENS), rel=1e-5
    )
    found = answers(model, Hardware())
    kept = model.prompt_nbytes(TOKENS - 1, "bfloat16")
    assert found["staging_nbytes"].value == 8 * kept
    assert found["kv_token_all_nbytes"].value == 62 * a_layer
    assert "52 windows x 1023 x 4096 x 16 bits / 8" in found["kv_prompt_nbytes"].formula


# ---------------------------------------------------------------------------------------- published


@pytest.mark.parametrize(
    ("name", "kib_a_token", "training_gflops"),
    [("deepseek-v3", 70.272, 250.0), ("llama-3.1-405b", 516.096, 2448.0)],
)
def test_deepseeks_own_figures(name, kib_a_token, training_gflops):
    """Insights into DeepSeek-V3 (arXiv 2505.09343): KB of KV a token, and GFLOPs to train on one
    of 4,096: three times the forward pass's."""
    model = read_model(name)
    assert float(model.token_nbytes("bfloat16")) == kib_a_token * 1000
    forward = model.prefill_flops(0, 4096) / 4096
    assert 3 * forward == pytest.approx(training_gflops * 1e9, rel=0.02)


@pytest.mark.parametrize(
    ("name", "tokens", "measured_s"),
    [
        ("llama-3.1-70b", 32_768, 0.472),
        ("llama-3.1-405b", 32_768, 1.6),
        ("llama-3.1-405b", 122_880, 7.5),
    ],
)
def test_prefills_that_nvidia_published(name, tokens, measured_s):
    """Of 32 GH200 at once (NVIDIA's blog on GH200 NVL32 and time to first token): if in FP8, they
    reach 25 to 50 % of the peak. The presets' half is the upper end, so computing looks fast."""
    hopper = Gpu(name="GH200", flops={"bf16": 989.4e12, "fp8": 1978.9e12})
    machine = look_up(Hardware(gpu=hopper, num_gpus=32))
    costs = engine_costs(replace(read_model(name), weights_dtype="fp8"), machine, step_s=0.0)
    assert 0.24 / 0.5 < costs.prefill_s(0, tokens) / measured_s < 1.0


def test_how_fast_vllm_computes_mixtures_in_fp8_on_mi300x():
    """Requests/s of Qwen3-235B-A22B (94 layers, 64 heads of 128) on four of them, throughput of
    prompts and answers of three lengths each (vLLM pull request 17535, before its tuning). The
    first two give what a token of a prompt and one of an answer take, the third tests them."""
    published = {(5000, 1000): 0.96, (1000, 2000): 1.01, (10_000, 500): 0.69}
    gpu = look_up(Hardware(gpu="mi300x", num_gpus=4)).gpu

    def attention_s(tokens):
        return 4 * 94 * 64 * 128 * tokens**2 / 2 / (4 * gpu.peak("bf16") * 0.5)

    times = {each: 1 / rate - attention_s(each[0]) for each, rate in published.items()}
    (first, first_s), (second, second_s), (third, third_s) = times.items()
    determinant = first[0] * second[1] - first[1] * second[0]
    token_s = (first_s * second[1] - second_s * first[1]) / determinant
    answer_s = (first[0] * second_s - second[0] * first_s) / determinant
    assert third[0] * token_s + third[1] * answer_s == pytest.approx(third_s, rel=0.02)
    share = 2 * 22e9 / token_s / (4 * gpu.peak("fp8"))
    assert share == pytest.approx(0.036, abs=0.0005)
    # In the vendor's test, eight MI308X and 35 billion parameters: six times the preset's 14 s.
    mi308x, tokens = look_up(Hardware(gpu="mi308x", num_gpus=8)).gpu, reference.fit().tokens
    pair_s = 4 * 62 * 96 * 128 / (8 * mi308x.peak("bf16") * 0.5)
    prefill_s = tokens * 2 * 35e9 / (8 * mi308x.peak("fp8") * share) + pair_s * tokens**2 / 2
    assert 8.5 * prefill_s == pytest.approx(96, abs=1)
