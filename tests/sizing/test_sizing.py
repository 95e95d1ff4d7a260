"""Answers of a plan against what can be worked out by hand."""

from __future__ import annotations

import math

import pytest

from headstart.errors import ConfigError
from headstart.sizing.configfile import known_models, read_model
from headstart.sizing.contexts import mean_tokens, parse_contexts
from headstart.sizing.documents import document
from headstart.sizing.hardware import Drive, Gpu, Hardware, look_up, presets, read_hardware
from headstart.sizing.load import Load
from headstart.sizing.plan import make_plan
from headstart.sizing.prefill import break_even_bytes_per_s, engine_costs
from headstart.sizing.sizing import Sizing

MODEL = "llama-3.1-8b"


def sizing(hardware=None, **load):
    model, machine = read_model(MODEL), look_up(hardware or Hardware())
    fields = {"contexts": ((8192, 1.0),), "concurrency": 16, **load}
    return Sizing(model, machine, Load(**fields), engine_costs(model, machine, step_s=0.0))


def answers(hardware=None, **load):
    return {each.key: each for each in make_plan(sizing(hardware, **load)).answers}


def seconds_of_one_token():
    """The last of 8,192, after the others."""
    return (2 * read_model(MODEL).active_parameters + 4 * 32 * 32 * 128 * 8191.5) / (989.4e12 * 0.5)


def test_break_even_and_what_follows_from_it():
    found = answers()
    assert found["kv_prompt_nbytes"].value == 8192 * 131072
    # One GPU at 989.4 TFLOPS x 0.5, all of the prompt but its last token loaded.
    seconds = (2 * 8.03e9 * 8192 + 4 * 32 * 32 * 128 * 8192**2 / 2) / (989.4e12 * 0.5)
    assert found["prefill_s"].value == pytest.approx(seconds)
    copy_s = 8191 * 131072 / (63e9 * 0.87)
    even = 8191 * 131072 / (seconds - seconds_of_one_token() - 1e-4 - copy_s)
    assert found["break_even_bytes_per_s"].value == pytest.approx(even)
    assert even == pytest.approx(3.56e9, rel=0.08)  # as by hand, but for the copy
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
    priced = {"cost_per_gpu_s", "gpu_s_price", "saved_month", "staging_concurrency"}
    assert not priced & set(answers())
    assert priced & set(answers(Hardware(gpu_hour=3.6))) == {"gpu_s_price", "saved_month"}
    found = answers(Hardware(storage_month=2592.0, gpu_hour=3.6, staging="10GiB"))
    saved = found["cost_per_gpu_s"]
    assert 0 < saved.value < 0.01
    assert found["gpu_s_price"].value == 0.001
    # 2,592 a month buy so many saved seconds, which are worth 0.001 each.
    worth = 2592.0 / saved.value * 0.001
    assert found["saved_month"].value == pytest.approx(worth)
    assert found["saved_month"].shown == f"{worth:.0f}"
    assert found["staging_concurrency"].value == 10 * 2**30 // (8191 * 131072)


def test_every_answer_has_its_formula_and_the_document_is_json():
    import json

    hardware = Hardware(drive="nvme-gen3", network="100gbe", storage_month=1.0, staging="1GiB")
    plan = make_plan(sizing(hardware, memory_share=0.5))
    assert all(len(each.formula) > 10 for each in plan.answers)
    assert len({each.key for each in plan.answers}) == len(plan.answers)
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
    assert machine.link.bytes_per_s == pytest.approx(8 * 63e9 * 0.87)
    assert look_up(Hardware(read_bytes_per_s=6.78e9)).read_bytes_per_s == 6.78e9


def test_more_links_do_not_bring_latent_kv_sooner():
    machine = look_up(Hardware(num_gpus=8))
    load = Load(contexts=((8192, 1.0),), concurrency=1)
    rates = {}
    for name in ("llama-3.1-8b", "deepseek-v3"):
        model = read_model(name)
        costs = engine_costs(model, machine)
        rates[name] = costs.copy_bytes_per_s
        assert Sizing(model, machine, load, costs).machine.link.bytes_per_s == rates[name]
    assert rates["llama-3.1-8b"] == pytest.approx(8 * rates["deepseek-v3"])
    assert rates["deepseek-v3"] == pytest.approx(63e9 * 0.87)


def test_every_preset_names_its_source():
    found = presets()
    parts = [*found.gpus.values(), *found.links.values(), *found.drives.values()]
    parts += [*found.networks.values(), found.raid0, found.mfu]
    assert len(parts) == 5 + 3 + 4 + 3 + 2
    assert all(len(part.source) > 30 for part in parts)


@pytest.mark.parametrize(
    "hardware",
    [
        *(Hardware(gpu=name) for name in presets().gpus),
        *(Hardware(link=name) for name in presets().links),
        *(Hardware(drive=name, num_drives=2) for name in presets().drives),
        *(Hardware(network=name, num_ports=2) for name in presets().networks),
    ],
    ids=str,
)
def test_a_plan_with_every_preset(hardware):
    found = answers(hardware)
    assert all(0.0 <= each.value < math.inf for each in found.values())


@pytest.mark.parametrize("name", known_models())
def test_a_plan_for_every_model(name):
    model, machine = read_model(name), look_up(Hardware(num_gpus=8))
    costs = engine_costs(model, machine)
    plan = make_plan(Sizing(model, machine, Load(contexts=((4096, 1.0),), concurrency=4), costs))
    endless = {each.key for each in plan.answers if not 0.0 <= each.value < math.inf}
    # Eight such GPUs compute a small model sooner than anything is copied to them.
    assert endless == ({"break_even_bytes_per_s"} if name == "smollm2-135m" else set())


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
    assert parse_contexts("32k:25%,8k:75%") == ((8192, 0.75), (32768, 0.25))
    found = parse_contexts("p50=8k,p99=64k")
    assert sum(share for _, share in found) == pytest.approx(1.0)
    assert found[0][0] < 8192 < found[-1][0] <= 65536
    assert 8192 < mean_tokens(found) < 20000


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "0", "8k:0", "8k:x", "p50=8k", "p50=8k,p99=4k", "inf", "nan", "-5", "1e300"),
        *("8k:1e308,32k:1e308", "p50=8k,p50=9k,p99=64k", "8k:,9k", "8k:nan"),
    ],
)
def test_contexts_that_cannot_be(text):
    with pytest.raises(ConfigError, match="context"):
        parse_contexts(text)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"concurrency": 0}, "concurrency is 0; supply a number from 1"),
        ({"output_tokens": 0}, "output_tokens is 0; supply a number from 1"),
        ({"hit_share": 0.0}, "hit share 0 must be above 0"),
        ({"memory_share": 1.0}, "memory share 1 must be .* below 1: .* no storage to size"),
        ({"pool_tokens": -1}, "pool_tokens is -1; supply a number from 0"),
        ({"pool_tokens": 10**300}, "pool_tokens is 1000.* to 1e\\+18"),
        ({"contexts": ((1, 1.0),)}, "0 are held and have no KV to load; ask for longer"),
        ({"hit_share": 1e-5}, "0 are held and have no KV to load; .* larger share"),
        ({"tpot_s": -1.0}, "output token -1 s"),
        ({"kv_dtype": "int4"}, "KV dtype 'int4' is unknown; allowed: float32"),
        ({"contexts": ((200_000, 1.0),)}, "at most 131072"),
        ({"concurrency": 5000}, "can be simulated"),
    ],
)
def test_loads_that_cannot_be(load, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(sizing(**load))


@pytest.mark.parametrize(
    "steps", [{"step_s": -1.0}, {"max_step_tokens": 0}, {"max_step_tokens": 10**20}]
)
def test_steps_that_cannot_be(steps):
    with pytest.raises(ConfigError, match="they last 0 s or more"):
        engine_costs(read_model(MODEL), look_up(Hardware()), **steps)


def test_a_measured_step_is_no_work_of_its_tokens():
    model, machine = read_model(MODEL), look_up(Hardware())
    measured = [(1000, 1.1), (4000, 4.1)]
    costs = engine_costs(model, machine, measured=measured, step_s=0.1)
    assert [costs.prefill_s(0, n) for n, _ in measured] == pytest.approx([1.1, 4.1], rel=0.01)
    assert costs.prefill_s(999, 1000) == pytest.approx(0.101, rel=0.01)
    with pytest.raises(ConfigError, match="with such steps"):
        engine_costs(model, machine, measured=measured, step_s=1.2)


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ((1024, float("nan")), "cannot be"),
        ((-5, 1.0), "cannot be"),
        ((1024, 1e-12), "seconds, not less"),
        ((200_000, 9.0), "has at most 131072"),
    ],
)
def test_prefills_that_cannot_be(measured, message):
    with pytest.raises(ConfigError, match=message):
        engine_costs(read_model(MODEL), look_up(Hardware()), measured=[measured])


def test_the_formula_says_whether_prefills_were_measured():
    found = answers()["prefill_s"].formula
    assert "(2 x 8.03e+09 parameters, given as active_parameters) FLOPs" in found
    assert "(9.894e+14 FLOPS in bf16 x 0.5 of it x 1 GPUs)" in found
    model, machine = read_model(MODEL), look_up(Hardware())
    costs = engine_costs(model, machine, measured=[(1000, 1.0)])
    asked = Load(contexts=((8192, 1.0),), concurrency=1)
    plan = make_plan(Sizing(model, machine, asked, costs))
    (prefill,) = (each for each in plan.answers if each.key == "prefill_s")
    assert "fitted to measured prefills" in prefill.formula


# ------------------------------------------------------------------------------------- host memory


def test_a_hit_in_memory_is_copied_and_not_read():
    found = answers()
    copy_s = 8191 * 131072 / (63e9 * 0.87)
    assert found["memory_hit_s"].value == pytest.approx(copy_s + seconds_of_one_token())
    read_s = 1e-4 + 8191 * 131072 / 7e9
    assert found["load_s"].value == pytest.approx(read_s + found["memory_hit_s"].value)


def test_hits_in_memory_leave_fewer_reads():
    none, most = answers(), answers(memory_share=0.75)
    even = most["break_even_bytes_per_s"].value
    assert even == none["break_even_bytes_per_s"].value
    assert most["engines_fed"].value == math.floor(4 * 7e9 / even)
    assert most["memory_nbytes"].value == pytest.approx(0.75 * most["pool_nbytes"].value)
    assert "memory_nbytes" not in none
    # The typical hit is then as fast as memory, the slowest is still read.
    assert most["hit_ttft_p50_s"].value < 0.5 * none["hit_ttft_p50_s"].value
    assert most["hit_ttft_p99_s"].value > none["hit_ttft_p50_s"].value
    assert most["recompute_ttft_p50_s"].value == none["recompute_ttft_p50_s"].value


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_the_flip_with_a_share_in_memory(share):
    found = sizing(Hardware(num_engines=2), memory_share=share)
    last = found.flip(65536)
    assert last >= 1
    assert found.cell(65536, last).ratio <= 1.0 < found.cell(65536, last + 1).ratio + 1e-3


def test_saved_gpu_seconds_of_memory_are_not_the_storages():
    hardware = Hardware(storage_month=2592.0, read_bytes_per_s=1e12)
    all_, half = answers(hardware), answers(hardware, memory_share=0.5)
    assert half["cost_per_gpu_s"].value == pytest.approx(2 * all_["cost_per_gpu_s"].value, rel=0.05)
