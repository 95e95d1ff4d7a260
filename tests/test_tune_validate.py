"""`benchmarks/tune_validate.py` on runs of real vLLM: SmolLM2, chats, one request at a time."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import msgspec
import pytest

from headstart.bench.imports import read_runs
from headstart.errors import ConfigError
from headstart.tuner.recorded import record

HERE = Path(__file__).parent
SCRIPT = HERE.parent / "benchmarks" / "tune_validate.py"
ARMS = HERE.parent / "benchmarks" / "serve_arms.sh"
RECORDED = HERE / "data" / "serve_arms.json"
"""Of eight chats of two turns: gpu-prefix twice, headstart once, always from cold."""
CHATS = (
    "--workload multi-turn --sessions 8 --turns 2 --shared-tokens 384 --own-tokens 128 "
    "--output-tokens 8"
)
NOWHERE = Path("nowhere")


@pytest.fixture(scope="module")
def script():
    spec = spec_from_file_location("headstart_tune_validate", SCRIPT)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def files(tmp_path):
    """One round as the file to predict, another as one to learn from, and the script of both."""
    document = json.loads(RECORDED.read_text())
    arms = tmp_path / "arms.sh"
    arms.write_text(
        "".join(
            f'    measure {name} "a b" cold {CHATS} \\\n --documents 2\n'
            for name in ("chats", "before")
        )
    )
    for name, number in (("before", 0), ("chats", 1)):
        runs = [run for run in document["runs"] if run["round"] == number]
        (tmp_path / f"{name}.json").write_text(json.dumps({**document, "runs": runs}))
    return [tmp_path / "chats.json", tmp_path / "before.json"], arms


def validated(script, files):
    paths, arms = files
    return script.validate(paths, HERE.parent / "benchmarks/results/storage.json", arms, NOWHERE)


def test_a_run_of_vllm_is_predicted_from_another_one(script, files, capsys):
    found = validated(script, files)
    json.dumps(found)
    rows = found["rows"]
    assert [(row["workload"], row["arm"], row["phase"]) for row in rows] == [
        ("chats", "gpu-prefix", "cold"),
        ("chats", "headstart", "cold"),
        ("before", "gpu-prefix", "cold"),
    ]
    for row in rows:
        assert row["same_hits"] == row["requests"] == 16
        assert row["hit_points"] == 0.0
        assert row["p50_ratio"] == pytest.approx(1.0, abs=0.15)
        assert row["within"]
    assert rows[1]["tokens_by_source"] == [{"engine": 6784}]
    assert rows[1]["tokens_by_source_predicted"] == {"engine": 6784, "memory": 0, "file": 0}
    assert found["settings"]["token_nbytes"] == 30 * 2 * 3 * 64 * 4, (
        "layers, K and V, heads, floats"
    )
    learnt = found["prefill_without_the_file"]
    assert learnt["chats"] != learnt["before"]
    assert "3 of 3 within a point of hits" in capsys.readouterr().out


def test_later_phases_find_what_earlier_ones_left(script, files):
    """The same prompts again: with tiers all is held, also after a restart, by files alone."""
    paths, _ = files
    cold = [run for run in read_runs(paths[0]) if run.arm == "headstart"]
    asks, shape = script.load_of(CHATS.split(), NOWHERE)
    site = script.site_of(HERE.parent / "benchmarks/results/storage.json", 32)
    phases = [
        cold[0],
        *(msgspec.structs.replace(cold[0], phase=name) for name in ("steady", "host-cold")),
    ]
    parts = script.predicted(phases, asks, shape, site)
    whole = sum(16 * 32 if each.turn == 0 else 20 * 32 for each in asks)
    assert [sum(part.cached_tokens) for part in parts] == [6784, whole, whole]
    assert [part.by_source["file"] > 0 for part in parts] == [False, False, True]
    assert [part.by_source["memory"] > 0 for part in parts] == [False, True, False]
    assert parts[2].by_source["engine"] == 6784, "its own cache begins as it did"
    alone = [msgspec.structs.replace(run, arm="gpu-prefix") for run in phases]
    cached = [sum(part.cached_tokens) for part in script.predicted(alone, asks, shape, site)]
    assert cached[0] == cached[2] == 6784
    assert cached[0] < cached[1] < whole, "the pool does not hold them all"
    with pytest.raises(ConfigError, match="what engine-restart empties is not simulated here"):
        script.predicted(
            [msgspec.structs.replace(cold[0], phase="engine-restart")], asks, shape, site
        )


def test_a_trace_is_what_was_sent_in_whole_blocks(script, files, tmp_path):
    paths, _ = files
    run = read_runs(paths[0])[0]
    asks, shape = script.load_of(CHATS.split(), NOWHERE)
    script.write_trace(tmp_path / "sent.jsonl", [run, run], asks, shape)
    trace = record(tmp_path / "sent.jsonl")
    sent = sorted(run.requests, key=lambda request: request.sent_s)
    assert trace.block_size == 32
    assert trace.input_tokens.tolist() == 2 * [request.prompt_tokens for request in sent]
    assert trace.lengths.tolist() == 2 * [request.prompt_tokens // 32 for request in sent]
    assert trace.at_s[16] == pytest.approx(run.duration_s + sent[0].sent_s, abs=2e-3)
    half = len(trace.blocks) // 2
    assert trace.blocks[:half].tolist() == trace.blocks[half:].tolist(), "the same salt"
    other = msgspec.structs.replace(run, salt="another")
    script.write_trace(tmp_path / "sent.jsonl", [run, other], asks, shape)
    again = record(tmp_path / "sent.jsonl").blocks
    assert not set(again[:half].tolist()) & set(again[half:].tolist())


def test_what_does_not_belong_together_is_refused(script, files, tmp_path):
    (paths, arms), storage = files, HERE.parent / "benchmarks/results/storage.json"
    with pytest.raises(ConfigError, match="prefills of chats are learnt from other files"):
        script.validate(paths[:1], storage, arms, NOWHERE)
    for old, new, message in (
        ("chats", "talks", "has no 'chats'; it has talks, before"),
        ("--sessions 8", "--sessions 9", "asked other prompts than serve_arms.sh has now"),
    ):
        changed = tmp_path / "changed.sh"
        changed.write_text(arms.read_text().replace(old, new))
        with pytest.raises(ConfigError, match=message):
            script.validate(paths, storage, changed, NOWHERE)
    document = json.loads(paths[0].read_text())
    document["runs"][0]["requests"][3]["error"] = "gone"
    paths[0].write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="has requests that failed"):
        script.validate(paths, storage, arms, NOWHERE)


def test_the_command(script, files, tmp_path, monkeypatch, capsys):
    paths, arms = files
    out = tmp_path / "out.json"
    words = ["tune_validate.py", *map(str, paths), "--script", str(arms), "--json", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    assert script.main() == 0
    assert json.loads(out.read_text())["schema"] == "headstart.bench.tune_validate/1"
    out.unlink()
    monkeypatch.setattr(sys, "argv", [each for each in words if each != str(paths[1])])
    capsys.readouterr()
    assert script.main() == 2
    assert "give one more" in capsys.readouterr().err
    monkeypatch.setattr(script, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tune_validate.py", "--json", str(out)])
    assert script.main() == 0
    assert "run benchmarks/serve_arms.sh first" in capsys.readouterr().out
    assert not out.exists()


def test_it_knows_the_servers_and_loads_of_the_arms(script):
    text = ARMS.read_text()
    for words in (
        f"--num-gpu-blocks-override {script.POOL_BLOCKS + 1}",
        f'[memory]\ncapacity = "{script.MEMORY_NBYTES >> 20}MiB"',
        f'capacity = "{script.FILE_NBYTES >> 30}GiB"',
        f"--dtype {script.KV_DTYPE}",
        "--concurrency 1",
    ):
        assert words in text
    found = script.workloads(ARMS)
    assert set(found) == {"multi-turn", "rag", "unique", "fits", "none", "mooncake", "weka"}
    for words in found.values():
        if "--trace" not in words:
            assert script.load_of(words, NOWHERE)[0]
    with pytest.raises(ConfigError, match="nowhere/weka_claude_code_sample_39"):
        script.load_of(found["weka"], NOWHERE)
