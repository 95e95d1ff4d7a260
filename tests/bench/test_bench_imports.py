"""Files of this project and of other load generators, whole, cut short and of other things."""

import json

import msgspec
import pytest

from headstart.bench.imports import read_runs
from headstart.errors import ConfigError

VLLM = {
    "date": "20261130-120000",
    "endpoint_type": "openai",
    "backend": "openai",
    "request_rate": "inf",
    "duration": 4.0,
    "completed": 2,
    "ttfts": [0.5, 0.25, 0.0],
    "itls": [[0.1, 0.2], [], []],
    "input_lens": [100, 200, 300],
    "output_lens": [3, 1, 0],
    "generated_texts": ["one", "two", ""],
    "errors": ["", "", "Too Many Requests"],
    "median_ttft_ms": 375.0,
}
SGLANG = {key: VLLM[key] for key in VLLM if key not in ("date", "endpoint_type")}


def written(tmp_path, *documents):
    path = tmp_path / "run.json"
    path.write_text("\n".join(json.dumps(document) for document in documents))
    return path


def test_what_is_written_here_comes_back(tmp_path, run):
    made = run()
    path = tmp_path / "own.json"
    path.write_bytes(msgspec.json.encode(made))
    assert read_runs(path) == [made]


def test_vllms(tmp_path):
    (found,) = read_runs(written(tmp_path, VLLM))
    assert (found.tool, found.duration_s, len(found.requests)) == ("vllm", 4.0, 3)
    first, second, third = found.requests
    assert (first.ttft_s, first.latency_s, first.prompt_tokens) == (0.5, pytest.approx(0.8), 100)
    assert (first.tpot_s, first.output) == (pytest.approx(0.15), "one")
    assert (second.tpot_s, second.is_good) == (None, True)
    assert (third.is_good, third.error) == (False, "Too Many Requests")
    assert (first.itl_s, second.itl_s, third.itl_s) == ((0.1, 0.2), (), None)
    assert found.output_tokens_per_s == 1.0
    assert (found.hit_rate, found.send_lag_s, found.has_prefix_cache) == (None, None, None)
    assert found.pace == {"rate": None, "concurrency": None}
    (found,) = read_runs(written(tmp_path, {**VLLM, "request_rate": 2.5, "max_concurrency": 8}))
    assert found.pace == {"rate": 2.5, "concurrency": 8.0}


def test_sglangs_has_a_line_a_run(tmp_path):
    first, second = read_runs(written(tmp_path, SGLANG, {**SGLANG, "duration": 2.0}))
    assert (first.tool, second.tool, second.output_tokens_per_s) == ("sglang", "sglang", 2.0)


WRONG = {
    "": "is not JSON, or cut short",
    json.dumps(VLLM)[:-9]: "is not JSON, or cut short",
    json.dumps(SGLANG) + "\n" + json.dumps(SGLANG)[:50]: "line 2, is not JSON",
    "[1]": "a run is a JSON object, not a list",
    '{"a": 1}': r"of no known tool \(its keys: a\); known: .*--save-detailed",
    '{"median_ttft_ms": 1}': "averages only; .*--save-detailed",
    '{"median_ttft_ms": 1, "accept_length": null}': "averages only; .*--output-details",
    '{"schema": "headstart.bench.storage/1"}': "has the schema 'headstart.bench.storage/1'",
    '{"schema": "headstart.bench.serve/1"}': "missing required field",
    json.dumps({**VLLM, "itls": None}): "itls is missing, or no list",
    json.dumps({**VLLM, "output_lens": [1]}): "lists have different lengths",
    json.dumps({**VLLM, "duration": None}): "duration is missing",
    json.dumps({**VLLM, "duration": 0}): "a duration of 0",
    json.dumps({**VLLM, "input_lens": [1, "x", 2]}): "a request cannot be read",
    json.dumps({**VLLM, "ttfts": [-1.0, 0.1, 0.1]}): "a first token after -1.0 s",
    json.dumps({**VLLM, "itls": [[0.3, -0.1], [], []]}): "between two tokens is negative",
    json.dumps({**VLLM, "duration": float("inf")}): "a duration of inf",
    json.dumps({**VLLM, "itls": [[float("nan")], [], []]}): "a last one after nan s",
    json.dumps({**VLLM, "output_lens": [0, 1, 0]}): "an answer of 0",
    json.dumps({**VLLM, "input_lens": [float("inf"), 1, 1]}): "a request cannot be read",
    json.dumps(VLLM)[:-1] + ', "x": ' + "9" * 5000 + "}": "is not JSON",
    json.dumps({**VLLM, "errors": ["429"] * 3}): "no request was answered; the first error: 429",
    json.dumps({**VLLM, "ttfts": [], "itls": [], "errors": []}): "different lengths",
}


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_what_is_no_run_is_refused(tmp_path, text):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=WRONG[text]) as refused:
        read_runs(path)
    assert str(path) in str(refused.value)


def test_a_rate_search_has_the_runs_of_its_trials(tmp_path, run):
    silent = tuple(msgspec.structs.replace(r, error="HTTP 500") for r in run().requests)
    runs = [run(), msgspec.structs.replace(run(), requests=silent), run(seed=1)]
    search = {"schema": "headstart.bench.rate/1", "runs": msgspec.to_builtins(runs)}
    assert read_runs(written(tmp_path, search)) == [runs[0], runs[2]]
    for wrong, message in (
        ({"runs": None}, "runs is missing"),
        ({"runs": []}, "no request of any trial was answered"),
        ({"runs": search["runs"][1:2]}, "no request of any trial was answered"),
        ({"runs": [5]}, "runs is missing, or no list of runs"),
        ({"runs": [{}]}, "has the schema None"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_runs(written(tmp_path, {**search, **wrong}))


def test_a_run_of_before_times_between_tokens_were_kept_is_read(tmp_path, run):
    old = msgspec.to_builtins(run())
    for request in old["requests"]:
        del request["itl_s"]
    assert read_runs(written(tmp_path, old)) == [run()]


def test_a_run_without_requests_and_a_file_that_is_not_there_are_refused(tmp_path, run):
    empty = msgspec.structs.replace(run(), requests=())
    path = tmp_path / "empty.json"
    path.write_bytes(msgspec.json.encode(empty))
    with pytest.raises(ConfigError, match="no request was sent"):
        read_runs(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_runs(tmp_path / "none.json")
