"""Answers of a plan against what can be worked out by hand."""

from __future__ import annotations

import math

import pytest

from headstart.errors import ConfigError
from headstart.sizing.configfile import read_model
from headstart.sizing.contexts import mean_tokens, parse_contexts
from headstart.sizing.documents import document
from headstart.sizing.hardware import Drive, Gpu, Hardware, look_up, presets, read_hardware
from headstart.sizing.prefill import break_even_bytes_per_s, engine_costs
from headstart.sizing.queueing import Work, simulate
from headstart.sizing.sizing import Load, Sizing

MODEL = "llama-3.1-8b"


def sizing(hardware=None, **load):
    model, machine = read_model(MODEL), look_up(hardware or Hardware())
    fields = {"contexts": ((8192, 1.0),), "concurrency": 16, **load}
    return Sizing(model, machine, Load(**fields), engine_costs(model, machine, step_s=0.0))


def answers(hardware=None, **load):
    return {each.key: each for each in sizing(hardware, **load).plan().answers}


def test_break_even_and_what_follows_from_it():
    found = answers()
    assert found["kv_prompt_nbytes"].value == 8192 * 131072
    # One GPU at 989.4 TFLOPS x 0.5, all of the prompt but its last token loaded.
    seconds = (2 * 8.03e9 * 8192 + 4 * 32 * 32 * 128 * 8192**2 / 2) / (989.4e12 * 0.5)
    assert found["prefill_s"].value == pytest.approx(seconds)
    assert found["break_even_bytes_per_s"].value == pytest.approx(3.56e9, rel=0.005)
    assert found["engines_fed"].value == 1
    assert found["flip_concurrency"].value == 1
    assert found["staging_nbytes"].value == 16 * 8191 * 131072
    assert found["reread_s"].value == pytest.approx(1000 * 8192 * 131072 / 7e9)
    assert found["rebuild_s"].value == pytest.approx(1000 * seconds)


def test_the_slower_of_computing_and_writing_rebuilds():
    slow = Drive(read_bytes_per_s=7e9, write_bytes_per_s=1e9)
    found = answers(Hardware(drive=slow))
    assert found["rebuild_s"].value == pytest.approx(1000 * 8192 * 131072 / 1e9)


def test_the_answer_flips_where_the_break_even_says():
    found = sizing()
    for tokens in (1024, 8192, 65536):
        last = found.flip(tokens)
        assert found.cell(tokens, max(1, last)).ratio <= 1.02 or last == 0
        assert found.cell(tokens, last + 1).ratio > 0.98


def test_engines_that_share_get_a_share():
    one, four = sizing(), sizing(Hardware(num_engines=4))
    assert four.flip(65536) == one.flip(65536) // 4
    assert four.cell(65536, 1).load_s > 3 * one.cell(65536, 1).load_s


def test_a_part_of_each_prompt_held_saves_less_and_loads_less():
    all_, half = sizing(), sizing(hit_share=0.5)
    assert half.nbytes(8192) == 4096 * 131072
    assert half.saved_s(8192) < 0.5 * all_.saved_s(8192)
    assert half.break_even(8192) > all_.break_even(8192)


def test_prices_and_staging_are_answered_only_where_known():
    assert not {"cost_per_gpu_s", "staging_concurrency"} & set(answers())
    found = answers(Hardware(storage_month=2592.0, gpu_hour=3.6, staging="10GiB"))
    saved = found["cost_per_gpu_s"]
    assert 0 < saved.value < 0.01
    assert "a GPU second costs 0.001" in saved.formula
    assert found["staging_concurrency"].value == 10 * 2**30 // (8191 * 131072)


def test_every_answer_has_its_formula_and_the_document_is_json():
    import json

    plan = sizing(Hardware(drive="nvme-gen3", network="100gbe", storage_month=1.0)).plan()
    assert all(len(each.formula) > 10 for each in plan.answers)
    text = json.dumps(document(plan), allow_nan=False)
    assert json.loads(text)["schema"] == "headstart.plan/1"


def test_nothing_is_enough_where_latency_takes_what_is_saved():
    assert break_even_bytes_per_s(100, 1.0, 1.0) == math.inf
    assert break_even_bytes_per_s(100, 2.0, 1.0) == 100.0


# ---------------------------------------------------------------------------------------- hardware


def test_the_slowest_part_counts():
    array = Hardware(drive="nvme-gen4", num_drives=4, network="100gbe", num_gpus=8)
    machine = look_up(array)
    assert machine.slowest.name == "network"
    assert machine.read_bytes_per_s == pytest.approx(10.25e9)
    many = look_up(Hardware(drive="nvme-gen5", num_drives=8))
    assert (many.slowest.name, many.read_bytes_per_s) == ("links to the GPUs", 63e9 * 0.87)
    assert look_up(Hardware(read_bytes_per_s=6.78e9)).read_bytes_per_s == 6.78e9


def test_more_links_do_not_bring_latent_kv_sooner():
    hardware = Hardware(num_gpus=8, read_bytes_per_s=1e12)
    machine = look_up(hardware)
    load = Load(contexts=((8192, 1.0),), concurrency=1)
    rates = {}
    for name in ("llama-3.1-8b", "deepseek-v3"):
        model = read_model(name)
        rates[name] = Sizing(
            model, machine, load, engine_costs(model, machine)
        ).machine.read_bytes_per_s
    assert rates["llama-3.1-8b"] == pytest.approx(8 * rates["deepseek-v3"])
    assert rates["deepseek-v3"] == pytest.approx(63e9 * 0.87)


def test_every_preset_names_its_source():
    found = presets()
    parts = [*found.gpus.values(), *found.links.values(), *found.drives.values()]
    parts += [*found.networks.values(), found.raid0, found.mfu]
    assert len(parts) == 5 + 3 + 4 + 3 + 2
    assert all(len(part.source) > 30 for part in parts)


@pytest.mark.parametrize("gpu", presets().gpus)
def test_every_gpu_computes_with_all_weights(gpu):
    found = presets().gpus[gpu]
    assert found.peak("bfloat16") < found.peak("fp8")
    assert found.peak("fp4") >= found.peak("bfloat16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu = 'h900'", "'h900' is no preset; there are h100, h200"),
        ("read_bytes_per_s = 0.0", "read_bytes_per_s is 0; supply a finite number above 0"),
        ("num_drives = 0", "num_drives is 0; it must be at least 1"),
        ("raid0_efficiency = 1.5\nnum_drives = 2", "raid0_efficiency is 1.5"),
        ("[drive]\nread_bytes_per_s = 0.0\nwrite_bytes_per_s = 1.0", "drive read_bytes_per_s is 0"),
        ("nmu_gpus = 1", "nmu_gpus.*allowed keys: gpu, num_gpus"),
        ("[gpu]\nname = 'x'", "missing required field `flops`"),
        ("[gpu]\nname = 'x'\n[gpu.flops]\nfp8 = 1.0", "flops must have bf16"),
        ("gpu = [", "hardware file"),
    ],
)
def test_a_hardware_file_that_cannot_be(tmp_path, text, message):
    path = tmp_path / "hardware.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        engine_costs(read_model(MODEL), look_up(read_hardware(path)))


def test_a_hardware_file_with_a_gpu_of_its_own(tmp_path):
    path = tmp_path / "hardware.toml"
    path.write_text(
        'drive = "nvme-gen5"\n[gpu]\nname = "mine"\nflops = { bf16 = 1e14 }\n'
        'link = "pcie4-x16"\nmfu = 0.4\n'
    )
    machine = look_up(read_hardware(path))
    assert (machine.gpu, machine.mfu) == (
        Gpu(name="mine", flops={"bf16": 1e14}, link="pcie4-x16", mfu=0.4),
        0.4,
    )
    assert read_hardware(path).drive == "nvme-gen5"
    with pytest.raises(ConfigError, match="hardware file"):
        read_hardware(tmp_path / "missing.toml")


# ---------------------------------------------------------------------------------- contexts, load


def test_contexts():
    assert parse_contexts("8192") == ((8192, 1.0),)
    assert parse_contexts("32k:1,8k:3") == ((8192, 0.75), (32768, 0.25))
    found = parse_contexts("p50=8k,p99=64k")
    assert sum(share for _, share in found) == pytest.approx(1.0)
    assert found[0][0] < 8192 < found[-1][0] <= 65536
    assert 8192 < mean_tokens(found) < 20000


@pytest.mark.parametrize("text", ["", "x", "0", "8k:0", "8k:x", "p50=8k", "p50=8k,p99=4k", "inf"])
def test_contexts_that_cannot_be(text):
    with pytest.raises(ConfigError, match="context"):
        parse_contexts(text)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"concurrency": 0}, "at least 1"),
        ({"hit_share": 0.0}, "hit share 0 must be above 0"),
        ({"tpot_s": -1.0}, "output token -1 s"),
        ({"kv_dtype": "int4"}, "KV dtype 'int4' is unknown; allowed: float32"),
        ({"contexts": ((200_000, 1.0),)}, "at most 131072"),
        ({"concurrency": 5000}, "can be simulated"),
    ],
)
def test_loads_that_cannot_be(load, message):
    with pytest.raises(ConfigError, match=message):
        sizing(**load).plan()


# ---------------------------------------------------------------------------------------- queueing


def work(**changes):
    fields = {"share": 1.0, "load_nbytes": 1000, "fixed_s": 0.0, "compute_s": 0.0, "decode_s": 0.0}
    return Work(**{**fields, **changes})


def test_prompts_at_once_share_the_device_and_come_together():
    times = simulate([work(decode_s=5.0)], clients=8, bytes_per_s=1000.0)
    assert times.burst_p50_s == times.burst_worst_s == pytest.approx(8.0)
    # In step: all load, all decode.
    assert times.p50_s == times.p99_s == pytest.approx(8.0)
    assert times.requests_per_s == pytest.approx(8 / 13.0, rel=0.04)


def test_computing_is_in_turn():
    times = simulate([work(load_nbytes=0, compute_s=2.0)], clients=5, bytes_per_s=1.0)
    assert (times.burst_p50_s, times.burst_worst_s) == (6.0, 10.0)
    assert times.p50_s == pytest.approx(10.0)
    assert times.requests_per_s == pytest.approx(0.5, rel=0.05)


def test_engines_share_the_device_but_not_their_gpus():
    both = simulate([work(compute_s=2.0)], clients=1, engines=3, bytes_per_s=1000.0)
    assert both.burst_worst_s == pytest.approx(3.0 + 2.0)


def test_latency_is_waited_for_and_long_prompts_make_the_tail():
    one = simulate([work(fixed_s=0.5)], clients=1, bytes_per_s=1000.0)
    assert one.p50_s == pytest.approx(1.5)
    mixed = simulate(
        [work(share=0.9), work(share=0.1, load_nbytes=50_000)], clients=1, bytes_per_s=1000.0
    )
    assert (mixed.p50_s, mixed.p99_s) == (pytest.approx(1.0), pytest.approx(50.0))
