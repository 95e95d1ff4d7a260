"""`headstart tune --model`: what is printed, written, interrupted and refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from headstart.cli.main import main
from headstart.config import load_settings
from headstart.tuner.case import Case
from trace_cases import WEKA, lines
from tuner_cases import SIZE, chats

BLOCK = 512
MODEL = ("--model", "llama-3.1-8b")
TRACE = ("--trace-block-size", f"{BLOCK}")


def ended(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(list(map(str, args)))
    return end.value.code or 0, capsys.readouterr()


@pytest.fixture
def trace(tmp_path):
    rows = chats(7, num_requests=80)
    for row in rows:
        row["input_length"] *= BLOCK // SIZE
        row["timestamp"] *= 20
    path = tmp_path / "load.jsonl.gz"
    path.write_bytes(gzip.compress(lines(rows)))
    return path


@pytest.fixture
def hardware(tmp_path):
    def write(text):
        path = tmp_path / "hw.toml"
        path.write_text(text)
        return path

    return write


PRICED = """
gpu = "h200"
num_drives = 2
gpu_hour = 3.6
memory_gib_month = 3.0
storage_gib_month = 0.15
"""
FEW = ("--memory-sizes", "1GiB,2GiB", "--file-sizes", "0,4GiB", "--block-sizes", "512,1024")


def test_times_prices_and_settings(capsys, trace, hardware, tmp_path):
    pytest.importorskip("matplotlib")
    page, result = tmp_path / "page.html", tmp_path / "result.json"
    words = (*MODEL, "--hardware", hardware(PRICED), *FEW, "--slo", "ttft=70ms")
    code, printed = ended(capsys, "tune", trace, *TRACE, *words, "--html", page, "--json", result)
    assert code == 0
    for text in (
        "no limit",
        "TTFT p50",
        "recommended",
        "in SLO",
        "a month",
        "saves",
        "a saved GPU second",
    ):
        assert text in printed.out
    assert printed.out.count("recommended capacit") == 1, "one advice"
    document = json.loads(result.read_text())
    assert document["schema"] == "headstart.tune/1"
    assert document["trace"]["token_nbytes"] == 131072
    latency, advice = document["latency"], document["recommended"]
    assert len(latency["points"]) == 1 + 4 + 7, "no cache, capacities, the rest at the knee"
    assert latency["without"] == latency["points"][0]
    assert advice["ttft_s"]["p50"] < latency["without"]["ttft_s"]["p50"]
    assert {"policy", "block_size", "capacity_tokens", "token_hit_last_half"} <= set(advice)
    assert all(point["cost_month"] is not None for point in document["pareto"])
    settings = tmp_path / "headstart.toml"
    settings.write_text(advice["settings"]["headstart_toml"])
    found = load_settings(settings, {})
    assert found.memory.capacity == advice["memory_nbytes"]
    assert sum(tier.capacity for tier in found.tiers) == advice["file_nbytes"]
    assert settings.read_text() in printed.out
    for engine, flags in advice["settings"]["engine_flags"].items():
        assert f"{engine}: {flags}" in printed.out
    text = page.read_text()
    assert text.count("<svg viewBox") >= 5
    for title in ("by capacity", "by block size", "by policy", "Where tokens come from"):
        assert title in text
    assert "http://" not in text.replace("http://www.w3.org", "")


def test_it_is_the_same_every_time(capsys, trace):
    words = ("tune", trace, *TRACE, *MODEL, *FEW, "--json", "-")
    assert ended(capsys, *words)[1].out == ended(capsys, *words)[1].out


def test_a_trace_without_times_needs_a_rate(capsys, tmp_path):
    path = tmp_path / "agents.json"
    path.write_text(json.dumps(WEKA))
    code, printed = ended(capsys, "tune", path, *MODEL)
    assert code == 2
    assert "give --rate, the sessions that start a second" in printed.err
    code, printed = ended(capsys, "tune", path, *MODEL, "--rate", "0.1")
    assert code == 0
    assert "made up by --rate" in printed.out
    assert ended(capsys, "tune", path)[0] == 0, "hits need no times"

    code, printed = ended(capsys, "tune", path, *MODEL, "--concurrency", "2")
    assert code == 0
    assert "a closed loop of 2 at once" in printed.out


def test_a_closed_loop_queues_by_its_places(capsys, trace):
    few = ("--memory-sizes", "1GiB", "--file-sizes", "0", "--block-sizes", "512", "--json", "-")

    def latency(*words):
        words = (*MODEL, *few, "--tpot", "0s", *words)
        return json.loads(ended(capsys, "tune", trace, *TRACE, *words)[1].out)["latency"]

    found = [latency(), latency("--concurrency", "1"), latency("--concurrency", "4")]
    assert [each["concurrency"] for each in found] == [None, 1, 4]
    timed, alone, crowd = (each["without"]["ttft_s"]["mean"] for each in found)
    assert alone == pytest.approx(timed), "its times leave room"
    assert crowd == pytest.approx(4 * alone, rel=0.1), "three are before it"
    assert found[2]["without"]["offered_load"] > 0.9, "the engine never rests"
    assert not any("overloaded" in note for note in found[2]["notes"])


def test_prefills_as_a_run_of_vllm_had_them(capsys, trace):
    runs = Path(__file__).parent / "data" / "serve_arms.json"
    words = ("tune", trace, *TRACE, "--model", "smollm2-135m", *FEW, "--json", "-")
    code, printed = ended(capsys, *words, "--measured", f"{runs}#gpu-prefix/cold")
    assert code == 0
    slow = json.loads(printed.out)["latency"]["without"]["ttft_s"]["p50"]
    assert (
        slow > 100 * json.loads(ended(capsys, *words)[1].out)["latency"]["without"]["ttft_s"]["p50"]
    )


def test_what_is_done_stays_after_ctrl_c(capsys, trace, tmp_path, monkeypatch):
    time, count = Case.time, iter(range(100))

    def interrupted(*args):
        if next(count) == 3:
            raise KeyboardInterrupt
        return time(*args)

    monkeypatch.setattr(Case, "time", interrupted)
    result = tmp_path / "result.json"
    code, printed = ended(capsys, "tune", trace, *TRACE, *MODEL, *FEW, "--json", result)
    assert code == 130
    assert "interrupted: only 3 settings were tried" in printed.out
    latency = json.loads(result.read_text())["latency"]
    assert (latency["interrupted"], len(latency["points"])) == (True, 3)


def test_hits_stay_after_ctrl_c_before_any_time(capsys, trace, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Case, "time", interrupted)
    code, printed = ended(capsys, "tune", trace, *TRACE, *MODEL, *FEW, "--json", "-")
    document = json.loads(printed.out)
    assert (code, document["interrupted"], "latency" in document) == (130, True, False)
    assert document["curve"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("gpus = 4", "unknown field `gpus`; allowed keys: gpu, num_gpus"),
        ("read_bytes_per_s = 0.0", "read_bytes_per_s is 0; supply a finite number above 0"),
        ('[drive]\nsource = "x"\nread_bytes_per_s = 0.0\nwrite_bytes_per_s = 1.0', "drive read_b"),
        ("memory_gib_month = -1.0", "memory_gib_month is -1; supply a finite number above 0"),
        ("block_s = -1.0", "block_s is -1; supply"),
        ("num_engines = 0", "num_engines is 0; it must be at least 1"),
    ],
)
def test_wrong_hardware_is_refused(capsys, trace, hardware, file, message):
    words = (*MODEL, "--hardware", hardware(file))
    code, printed = ended(capsys, "tune", trace, *TRACE, *words)
    assert code == 2
    assert message in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "gpt-9"), "is neither a readable config.json"),
        (("--slo", "ttft=1s"), "--slo is for times, which need --model"),
        (("--hardware", "hw.toml"), "--hardware is for times, which need --model"),
        (("--memory-sizes", "1GiB"), "--memory-sizes is for times, which need --model"),
        ((*MODEL, "--hardware", "/nowhere"), "hardware file /nowhere: No such file"),
        ((*MODEL, "--memory-sizes", "0,1GiB"), "0 is no memory tier"),
        ((*MODEL, "--memory-sizes", "1KiB"), "does not hold one block of 512 tokens"),
        ((*MODEL, "--file-sizes", "much"), "--file-sizes 'much': 'much' is not a quantity"),
        ((*MODEL, "--block-sizes", "16"), "blocks of 16 tokens cannot be told from a trace in"),
        ((*MODEL, "--block-sizes", "x"), "are no numbers of tokens; write 16,64,256"),
        ((*MODEL, "--slo", "fast"), "--slo 'fast' is unknown"),
        ((*MODEL, "--tpot", "soon"), "'soon' is not a quantity"),
        ((*MODEL, "--kv-dtype", "int3"), "KV dtype 'int3' is unknown"),
        ((*MODEL, "--engine-kv", "all"), "'all' is not a quantity"),
        ((*MODEL, "--time-gain", "100%"), "--time-gain '100%' is no share"),
        ((*MODEL, "--prefill", "x"), "write tokens=seconds"),
        ((*MODEL, "--prefill", "9=1", "--measured", "x"), "tell the same: leave one of them out"),
        ((*MODEL, "--measured", "/nowhere"), "/nowhere cannot be read"),
        (("--measured", "x.json"), "--measured is for times, which need --model"),
        (("--tpot", "20ms"), "--tpot is for times, which need --model"),
        (("--engine-kv", "1GiB"), "--engine-kv is for times, which need --model"),
        (("--kv-dtype", "fp8"), "--kv-dtype is for times, which need --model"),
        (("--time-gain", "20%"), "--time-gain is for times, which need --model"),
        (("--all-combinations",), "--all-combinations is for times, which need --model"),
        ((*MODEL, "--concurrency", "1", "--rate", "2"), "--rate does not change"),
        (("--concurrency", "1"), "--concurrency is for times, which need --model"),
        ((*MODEL, "--policies", "best"), "policy 'best' is unknown"),
    ],
)
def test_wrong_usage_ends_with_2(capsys, trace, words, message):
    code, printed = ended(capsys, "tune", trace, *TRACE, *words)
    assert code == 2
    assert message in printed.err


def test_recurrent_layers_cannot_be_timed(capsys, trace, tmp_path):
    config = {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
        "full_attention_interval": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "dtype": "bfloat16",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    code, printed = ended(capsys, "tune", trace, *TRACE, "--model", path)
    assert code == 2
    assert "recurrent layers, whose states are no blocks of tokens" in printed.err
