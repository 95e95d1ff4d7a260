"""Files whose figures nobody can have measured are left out, and said so; none ends the doctor."""

import json
import math

import pytest

from headstart.doctor.readers import load
from headstart.errors import ConfigError
from headstart.node.decisions import DECISION_SCHEMA

HUGE = 10**400


def facts(path, text):
    path.write_text(text)
    report = load([path])
    return {fact.key: fact.value for fact in report.facts}, report.skipped


@pytest.mark.parametrize("value", [HUGE, math.nan, math.inf, -1, True, 1e308, "x", None], ids=str)
@pytest.mark.parametrize("name", ["prompt_tokens", "actual_load_s"])
def test_decisions(tmp_path, name, value):
    good = {
        "schema": DECISION_SCHEMA,
        "prompt_tokens": 100,
        "loaded_tokens": 50,
        "actual_load_s": 0.1,
        "actual_prefill_s": 0.2,
    }
    lines = [json.dumps(good), json.dumps({**good, name: value}), "[" * 100_000]
    told, skipped = facts(tmp_path / "decisions.jsonl", "\n".join(lines))
    assert (told["num_requests"], told["prompt_tokens"]) == (1.0, 100.0)
    assert [text.partition("jsonl:")[2] for text in skipped] == ["2: no decision", "3: no decision"]


@pytest.mark.parametrize("value", [HUGE, math.nan, math.inf, -1, True, 5e-324], ids=str)
@pytest.mark.parametrize("name", ["duration", "completed", "median_ttft_ms", "total_input_tokens"])
def test_averages(tmp_path, name, value):
    good = {"median_ttft_ms": 200.0, "p99_ttft_ms": 300.0, "duration": 10.0, "completed": 4}
    told, _ = facts(tmp_path / "a.json", json.dumps({**good, "total_input_tokens": 40}))
    assert told["prompt_tokens"] == 10.0
    told, _ = facts(tmp_path / "a.json", json.dumps({**good, name: value}))
    assert told["ttft_p99"] == pytest.approx(0.3)
    assert all(0.0 < each < 1e15 for each in told.values() if not isinstance(each, str))


def test_runs_within_runs_without_end(tmp_path):
    start = '{"schema":"headstart.bench.serve/1","runs":['
    told, skipped = facts(tmp_path / "a.json", start * 1500 + "]}" * 1500)
    assert told == {}
    assert any("nested too deeply" in text for text in skipped)


@pytest.mark.parametrize(
    "text",
    ["[" * 5000, "9" * 5000, '"1e308 P"', "1e400"],
    ids=["deep", "long", "infinite with its prefix", "infinite"],
)
def test_observations(tmp_path, text):
    with pytest.raises(ConfigError, match=r"o\.toml"):
        facts(tmp_path / "o.toml", f"prompt_tokens = {text}")


def test_a_name_that_no_file_can_have(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load([tmp_path / ("x" * 5000)])


@pytest.mark.parametrize("value", ["+Inf", "1e400", "-Inf", "NaN"])
def test_metrics(tmp_path, value):
    good = "vllm:num_requests_waiting 3\n"
    told, skipped = facts(tmp_path / "m.txt", f"{good}vllm:num_requests_running {value}\n")
    assert "concurrency" not in told
    assert bool(skipped) == (value != "NaN"), "what has no value yet is no fault"
