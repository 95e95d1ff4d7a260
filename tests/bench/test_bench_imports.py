"""Files of this project and of other load generators, whole, cut short and of other things."""

import json
from pathlib import Path

import msgspec
import pytest

from headstart.bench.imports import read_partners, read_runs
from headstart.bench.run import SCHEMA
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


def campaign(tmp_path, run, *kinds):
    """A file with a run for each (arm, phase, round)."""
    runs = [
        msgspec.to_builtins(run(arm=arm, phase=phase, round=number, salt=f"{number}"))
        for arm, phase, number in kinds
    ]
    return written(tmp_path, {"schema": SCHEMA, "environment": {"cpu": "any"}, "runs": runs})


BOTH = [
    (arm, phase, number)
    for number in (0, 1)
    for arm in ("none", "ours")
    for phase in ("cold", "steady", "host-cold")
]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_size": 0}, "blocks of 0 tokens"),
        ({"simulated_hit_rate": 1.5}, "a hit rate of 1.5"),
        ({"cached_tokens": -1}, "-1 tokens of a prompt of 100 were cached"),
        ({"cached_tokens": 101}, "101 tokens of a prompt of 100 were cached"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(tmp_path, run, changed, message):
    made = msgspec.to_builtins(run())
    first = made["requests"][0]
    (first if "cached_tokens" in changed else made).update(changed)
    with pytest.raises(ConfigError, match=message):
        read_runs(written(tmp_path, made))


def test_another_tool_may_count_a_prompt_otherwise(tmp_path, run):
    made = msgspec.to_builtins(run(tool="aiperf"))
    made["requests"][0]["cached_tokens"] = 101
    assert read_runs(written(tmp_path, made))[0].requests[0].cached_tokens == 101


@pytest.mark.parametrize("text", ["[" * 100_000, "{}\n" + "[" * 100_000])
def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path, text):
    path = tmp_path / "deep.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="deep"):
        read_runs(path)


def test_a_campaign_has_runs_to_choose_from(tmp_path, run):
    path = campaign(tmp_path, run, *BOTH)
    assert len(read_runs(path)) == 12

    def chosen(selector):
        return [(r.arm, r.phase, r.round) for r in read_runs(Path(f"{path}{selector}"))]

    assert chosen("#ours/host-cold") == [("ours", "host-cold", 0), ("ours", "host-cold", 1)]
    assert chosen("#none") == [("none", "steady", 0), ("none", "steady", 1)]
    for selector, message in {
        "#other": "there is no 'other'; there are: none/cold, none/steady, none/host-cold, o",
        "#ours/warm": "there is no 'ours/warm'; there are: none/cold",
        "#/cold": "there is no '/cold'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            chosen(selector)


def test_an_arm_in_one_phase_needs_no_phase_and_one_in_several_without_steady_does(tmp_path, run):
    path = campaign(tmp_path, run, ("a", "", 0), ("b", "cold", 0), ("b", "host-cold", 0))
    (found,) = read_runs(tmp_path / "run.json#a")
    assert found.arm == "a"
    with pytest.raises(ConfigError, match="name one of its phases; there are: b/cold, b/host-cold"):
        read_runs(tmp_path / "run.json#b")
    assert read_partners(tmp_path / "run.json#a") == [found]
    with pytest.raises(ConfigError, match=r"several arms or phases: choose one, .*run.json#a; the"):
        read_partners(path)


def test_partners_in_files_of_their_own_need_no_selector(tmp_path, run):
    path = tmp_path / "own#1.json"
    path.write_bytes(msgspec.json.encode(run(arm="a")))
    assert [r.arm for r in read_partners(path)] == ["a"], "a name may have a # in it"
    with pytest.raises(ConfigError, match="there is no 'b'; there are: a"):
        read_partners(tmp_path / "own#1.json#b")


def test_a_run_of_before_there_were_phases_is_read(tmp_path, run):
    fields = msgspec.to_builtins(run())
    new = ("phase", "round", "hit_tokens_by_tier", "cpu_s", "peak_memory_nbytes", "rebuild")
    for name in new:
        del fields[name]
    assert read_runs(written(tmp_path, fields)) == [run()]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"schema": SCHEMA, "runs": {}}, "runs is no list"),
        ({"schema": SCHEMA, "runs": []}, "no run was made"),
        ({"schema": SCHEMA, "runs": [{"schema": SCHEMA}]}, "missing required field"),
        ({"schema": SCHEMA, "runs": [5]}, "a run is a JSON object, not a int"),
        ({"schema": "other/1", "runs": []}, "has the schema 'other/1'"),
        ({"runs": []}, "is of no known tool"),
    ],
)
def test_what_is_no_campaign_is_refused(tmp_path, document, message):
    with pytest.raises(ConfigError, match=message):
        read_runs(written(tmp_path, document))
