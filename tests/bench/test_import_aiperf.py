"""AIPerf's records of requests, made up after its models, and what is not enough."""

from __future__ import annotations

import json

import pytest

from headstart.bench.imports import read_runs
from headstart.errors import ConfigError

START = 1_700_000_000_000_000_000
MS = 1_000_000


def record(number, at_ms, ttft_ms=50.0, *, turn=0, phase="profiling", error=None, **metrics):
    """One request; `metrics` are value and unit, None leaves one out."""
    known = {
        "input_sequence_length": (100 + number, "tokens"),
        "time_to_first_token": (ttft_ms, "ms"),
        "request_latency": (ttft_ms + 80.0, "ms"),
        "output_token_count": (5, "tokens"),
        "output_sequence_length": (5, "tokens"),
        "inter_token_latency": (20.0, "ms"),
        "inter_chunk_latency": ([20.0, 20.0, 20.0, 20.0], "ms"),
        **metrics,
    }
    return {
        "metadata": {
            "session_num": number,
            "x_request_id": f"request-{number}-{turn}",
            "x_correlation_id": f"talk-{number}",
            "conversation_id": "session_000000",
            "turn_index": turn,
            "credit_issued_ns": START + at_ms * MS - 1000,
            "request_start_ns": START + at_ms * MS,
            "request_ack_ns": None,
            "request_end_ns": START + at_ms * MS + 200 * MS,
            "worker_id": "worker_1",
            "record_processor_id": "record_processor_1",
            "benchmark_phase": phase,
            "was_cancelled": error is not None,
            "cancellation_time_ns": None,
        },
        "metrics": {
            name: {"value": value[0], "unit": value[1]}
            for name, value in known.items()
            if value is not None
        },
        "error": error,
    }


FAILED = record(
    1,
    100,
    error={"code": 499, "type": "RequestCancellationError", "message": "cancelled after 1 s"},
    time_to_first_token=None,
    request_latency=None,
    input_sequence_length=None,
    output_sequence_length=None,
    error_isl=(101, "tokens"),
)


def read(tmp_path, *documents):
    path = tmp_path / "profile_export.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return read_runs(path)


def test_records_are_one_run_in_the_order_of_its_sessions(tmp_path):
    (run,) = read(
        tmp_path,
        record(9, -500, phase="warmup"),
        record(2, 800, 25.0, usage_prompt_cache_read_tokens=(64, "tokens")),
        record(0, 300, turn=1, usage_prompt_cache_read_tokens=(0, "tokens")),
        record(0, 0, usage_prompt_cache_read_tokens=(0, "tokens")),
    )
    assert (run.tool, run.duration_s, run.pace) == ("aiperf", pytest.approx(1.0), None)
    first, turn, last = run.requests
    assert (first.session, turn.session, last.session) == ("talk-0", "talk-0", "talk-2")
    assert [each.sent_s for each in run.requests] == pytest.approx([0.0, 0.3, 0.8])
    assert (last.ttft_s, last.latency_s) == (pytest.approx(0.025), pytest.approx(0.105))
    assert (last.tpot_s, last.output_tokens) == (pytest.approx(0.02), 5)
    assert (last.prompt_tokens, last.cached_tokens) == (102, 64)
    assert run.hit_rate == pytest.approx(64 / 302)
    assert (first.intended_s, run.send_lag_s, first.output) == (None, None, None)


def test_one_record_is_a_run_too_and_failures_are_kept(tmp_path):
    (run,) = read(tmp_path, record(0, 0))
    assert (len(run.requests), run.hit_rate) == (1, None)
    (run,) = read(tmp_path, record(0, 0, 0.05, time_to_first_token=(0.05, "sec")), FAILED)
    good, failed = run.requests
    assert good.ttft_s == 0.05
    assert (failed.is_good, failed.prompt_tokens) == (False, 101)
    assert failed.error == "RequestCancellationError: cancelled after 1 s"


AVERAGES = {
    "schema_version": "1.0",
    "request_throughput": {"unit": "requests/sec", "avg": 3.5},
    "time_to_first_token": {"unit": "ms", "avg": 50.0, "p50": 48.0},
}
WRONG = {
    "averages": ([AVERAGES], "averages only; take AIPerf's profile_export.jsonl"),
    "raw": (
        [{"metadata": record(0, 0)["metadata"], "payload": {}, "responses": []}],
        "raw answers; take AIPerf's profile_export.jsonl",
    ),
    "genai-perf": (
        [
            {
                "service_kind": "openai",
                "endpoint": "v1/completions",
                "experiments": [
                    {"experiment": {"mode": "concurrency", "value": 1}, "requests": []}
                ],
                "version": "2.60",
            }
        ],
        "GenAI-Perf's answers have no counts of tokens; use its successor AIPerf",
    ),
    "warm-up": ([record(0, 0, phase="warmup")], "only requests of the warm-up"),
    "not streamed": ([record(0, 0, time_to_first_token=None)], "run with --streaming"),
    "unit": ([record(0, 0, time_to_first_token=(1, "days"))], "record 1: .*1 'days', no time"),
    "value": ([record(0, 0, time_to_first_token=([1], "ms"))], "no time"),
    "count": ([record(0, 0, input_sequence_length=(1.5, "tokens"))], "no whole number"),
    "metadata": ([{**record(0, 0), "metadata": {}}], "record 1: .*session_num"),
    "mixed": ([record(0, 0), {"a": 1}], "of no known tool"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_enough_is_refused(tmp_path, name):
    documents, message = WRONG[name]
    with pytest.raises(ConfigError, match=message) as refused:
        read(tmp_path, *documents)
    assert "profile_export.jsonl" in str(refused.value)
