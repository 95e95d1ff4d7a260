"""Files of load generators with figures that nobody measured: an error, never a verdict."""

import json
import math

import msgspec
import pytest

from headstart.bench.imports import read_runs
from headstart.errors import ConfigError

HUGE = 10**400
OWN = {
    "a request": [
        *({"ttft_s": value} for value in (math.nan, math.inf, -1.0, 5e-324, 1e308)),
        *({"latency_s": value} for value in (math.nan, math.inf, 1e308, 20.0)),
        *({name: value} for name in ("intended_s", "sent_s") for value in (math.nan, -math.inf)),
        *({name: value} for name in ("prompt_tokens", "output_tokens") for value in (HUGE, 0)),
        {"cached_tokens": HUGE},
        {"itl_s": [1e308]},
    ],
    "a run": [
        *({"duration_s": value} for value in (math.nan, 5e-324, 1e308, 0.001)),
        *({"block_size": value} for value in (HUGE, 0)),
        *({name: value} for name in ("read_nbytes", "loaded_nbytes") for value in (-1, HUGE)),
        *({"cpu_s": value} for value in (math.nan, math.inf, -1.0)),
        {"peak_memory_nbytes": -1},
        {"pace": {"rate": math.nan}},
        {"hit_tokens_by_tier": {"engine": -1}},
        {"rebuild": {"window": 3, "ttft_s": math.nan}},
    ],
}


def told(run):
    return json.loads(msgspec.json.encode(run()))


def test_what_is_changed_below_can_be_read(run, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(told(run)))
    assert len(read_runs(path)[0].good) == 40


@pytest.mark.parametrize("changed", OWN["a request"], ids=str)
def test_requests(run, tmp_path, changed):
    tree, path = told(run), tmp_path / "run.json"
    for request in tree["requests"][3:5]:
        request.update(changed)
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=r"run\.json"):
        read_runs(path)


@pytest.mark.parametrize("changed", OWN["a run"], ids=str)
def test_runs(run, tmp_path, changed):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(told(run) | changed))
    with pytest.raises(ConfigError, match=r"run\.json"):
        read_runs(path)


def arrays(**changed):
    return {
        "duration": 10.0,
        "ttfts": [0.1, 0.2],
        "itls": [[0.1], [0.1]],
        "input_lens": [10, 10],
        "output_lens": [2, 2],
        "errors": ["", ""],
        **changed,
    }


@pytest.mark.parametrize(
    "changed",
    [
        *({"duration": value} for value in (HUGE, True, math.nan)),
        *({"ttfts": [value] * 2} for value in (HUGE, math.nan, [1], "x")),
        *({name: [HUGE] * 2} for name in ("input_lens", "output_lens")),
        {"request_rate": HUGE},
        {"max_concurrency": math.nan},
    ],
    ids=lambda changed: str(changed)[:40],
)
def test_arrays(tmp_path, changed):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(arrays(**changed)))
    with pytest.raises(ConfigError, match=r"run\.json"):
        read_runs(path)


def test_an_infinite_rate_is_a_closed_loop_in_either_spelling(tmp_path):
    path = tmp_path / "run.json"
    for rate in (math.inf, "inf"):
        path.write_text(json.dumps(arrays(request_rate=rate, max_concurrency=4)))
        [run] = read_runs(path)
        assert (run.is_open_loop, run.pace) == (False, {"rate": None, "concurrency": 4.0})


def test_names_that_no_file_can_have(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_runs(tmp_path / ("x" * 5000 + "#arm"))


@pytest.mark.parametrize("changed", ["start", "ttft"])
def test_records_of_aiperf(tmp_path, changed):
    metadata = {"session_num": 0, "request_start_ns": 0, "request_end_ns": 10**9}
    ttft = {"value": 100.0, "unit": "ms"}
    if changed == "start":
        metadata["request_end_ns"] = HUGE
    else:
        ttft["value"] = HUGE
    path = tmp_path / "profile_export.jsonl"
    record = {"metadata": metadata, "metrics": {"time_to_first_token": ttft}}
    path.write_text(json.dumps(record) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(ConfigError, match="record 1"):
        read_runs(path)
