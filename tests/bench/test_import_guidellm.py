"""GuideLLM's reports, of the current schema and of the one before, made up after its models."""

from __future__ import annotations

import json

import pytest

from headstart.bench.imports import read_runs
from headstart.errors import ConfigError

START = 1_700_000_000.0


def entry(number, at_s, ttft_s=0.5, *, lag_s=0.01, tokens=3, cached=None, **changed):
    """One request: due at `at_s`, sent `lag_s` later, its first token `ttft_s` after that."""
    sent = START + at_s + lag_s
    timings = {
        "targeted_start": START + at_s,
        "queued": START - 1.0 + number / 100,
        "dequeued": START + at_s - 0.001,
        "scheduled_at": START + at_s,
        "resolve_start": sent,
        "request_start": sent,
        "first_request_iteration": sent + ttft_s,
        "first_token_iteration": sent + ttft_s,
        "last_token_iteration": sent + ttft_s + 0.2,
        "last_request_iteration": sent + ttft_s + 0.21,
        "request_iterations": tokens + 1,
        "token_iterations": tokens,
        "request_end": sent + ttft_s + 0.22,
        "resolve_end": sent + ttft_s + 0.23,
        "finalized": sent + ttft_s + 0.24,
    }
    timings.update(changed.pop("timings", {}))
    return {
        "type_": "generative_request_stats",
        "request_id": f"id-{number}",
        "response_id": f"cmpl-{number}",
        "request_args": "{}",
        "output": f"answer {number}",
        "info": {
            "request_id": f"id-{number}",
            "conversation_id": f"talk-{number // 2}",
            "turn_index": number % 2,
            "status": "completed",
            "timings": timings,
            "error": None,
            "traceback": None,
        },
        "input_metrics": {"text_tokens": 100 + number, "cached_tokens": cached},
        "output_metrics": {"text_tokens": tokens},
        "request_start_time": timings["request_start"],
        "request_end_time": timings["request_end"],
        "request_latency": timings["request_end"] - timings["request_start"],
        "prompt_tokens": 100 + number,
        "output_tokens": tokens,
        "time_to_first_token_ms": ttft_s * 1000,
        **changed,
    }


def failed(number, at_s, error):
    found = entry(number, at_s, output=None, prompt_tokens=None, output_tokens=None)
    found["info"].update(status="errored", error=error)
    found["info"]["timings"].update(first_token_iteration=None, last_token_iteration=None)
    return found


def benchmark(successful, errored=(), incomplete=(), *, strategy=None, totals=None):
    counts = {
        "successful": len(successful),
        "errored": len(errored),
        "incomplete": len(incomplete),
    }
    counts["total"] = sum(counts.values())
    return {
        "type_": "generative_benchmark",
        "config": {
            "run_id": "r",
            "run_index": 0,
            "strategy": strategy or {"type_": "concurrent", "streams": 4, "worker_count": 1},
            "constraints": {},
        },
        "scheduler_metrics": {"start_time": START - 1.0, "measure_start_time": START},
        "metrics": {"request_totals": {**counts, **(totals or {})}},
        "requests": {
            "successful": list(successful),
            "errored": list(errored),
            "incomplete": list(incomplete),
            "total": None,
        },
        "start_time": START,
        "end_time": START + 10.0,
        "duration": 10.0,
        "warmup_duration": 0.0,
        "cooldown_duration": 0.0,
    }


def report(*benchmarks, version=2):
    metadata = {"version": version, "guidellm_version": "0.7.3", "python_version": "3.11"}
    return {"metadata": metadata, "config": {}, "benchmarks": list(benchmarks)}


def read(tmp_path, document):
    path = tmp_path / "benchmarks.json"
    path.write_text(json.dumps(document))
    return read_runs(path)


def test_a_closed_loop_counts_from_when_a_request_was_sent(tmp_path):
    later, first = entry(1, 2.0, 0.25, cached=64), entry(0, 1.0, cached=0)
    (run,) = read(tmp_path, report(benchmark([later, first])))
    assert (run.tool, run.duration_s) == ("guidellm", 10.0)
    assert run.pace == {"rate": None, "concurrency": 4}
    one, two = run.requests
    assert (one.ttft_s, two.ttft_s) == (pytest.approx(0.5), pytest.approx(0.25))
    assert (one.latency_s, one.tpot_s) == (pytest.approx(0.7), pytest.approx(0.1))
    assert (one.prompt_tokens, two.prompt_tokens, one.output_tokens) == (100, 101, 3)
    assert (one.session, two.session, one.output) == ("talk-0", "talk-0", "answer 0")
    assert (one.intended_s, one.sent_s) == (None, pytest.approx(1.01))
    assert (one.cached_tokens, two.cached_tokens) == (0, 64)
    assert run.hit_rate == pytest.approx(64 / 201)
    assert (run.send_lag_s, run.salt, run.prompts) == (None, "", None)


def test_an_open_loop_counts_from_when_it_should_have_been_sent(tmp_path):
    strategy = {"type_": "poisson", "rate": 2.0, "max_concurrency": None, "random_seed": 1}
    (run,) = read(tmp_path, report(benchmark([entry(0, 1.0, lag_s=0.3)], strategy=strategy)))
    (request,) = run.requests
    assert request.ttft_s == pytest.approx(0.8)
    assert (request.intended_s, request.sent_s) == (pytest.approx(1.0), pytest.approx(1.3))
    assert run.send_lag_s == pytest.approx(0.3)
    assert (run.pace, run.is_open_loop) == ({"rate": 2.0, "concurrency": None}, True)
    strategy = {"type_": "trace", "time_scale": 0.001, "max_concurrency": None}
    (run,) = read(tmp_path, report(benchmark([entry(0, 1.0)], strategy=strategy)))
    assert run.pace["time_scale"] == 0.001
    assert run.is_open_loop
    (run,) = read(tmp_path, report(benchmark([entry(0, 1.0)], strategy={"type_": "synchronous"})))
    assert run.pace == {"rate": None, "concurrency": 1}


def test_what_failed_is_there_in_the_order_of_the_data(tmp_path):
    unfinished = entry(1, 9.9)
    unfinished["info"]["status"] = "cancelled"
    (run,) = read(
        tmp_path,
        report(
            benchmark(
                [entry(3, 3.0), entry(0, 0.0)], [failed(2, 2.0, "503 Unavailable")], [unfinished]
            )
        ),
    )
    assert [request.is_good for request in run.requests] == [True, False, False, True]
    assert run.requests[2].error == "503 Unavailable"
    assert "limit it by requests" in run.requests[1].error
    assert run.requests[2].prompt_tokens == 0
    not_streamed = entry(0, 0.0, timings={"first_token_iteration": None})
    with pytest.raises(ConfigError, match=r"no request was answered; .*was it streamed"):
        read(tmp_path, report(benchmark([not_streamed])))


def test_the_warm_up_is_left_out(tmp_path):
    warm_up, late = entry(0, -2.0), entry(2, 10.5)
    (run,) = read(
        tmp_path,
        report(benchmark([warm_up, entry(1, 1.0), late], totals={"successful": 1})),
    )
    assert [request.prompt_tokens for request in run.requests] == [101]


def test_the_schema_before(tmp_path):
    old = entry(0, 1.0)
    del old["info"]["conversation_id"], old["input_metrics"]["cached_tokens"]
    old["request_type"] = "chat_completions"
    document = report(benchmark([old]), version=1)
    document["args"] = document.pop("config")
    for each in (document, {key: document[key] for key in ("args", "benchmarks")}):
        (run,) = read(tmp_path, each)
        assert (run.requests[0].session, run.hit_rate) == ("id-0", None)


def test_a_sweep_has_many_runs(tmp_path):
    runs = read(tmp_path, report(benchmark([entry(0, 1.0)]), benchmark([entry(0, 1.0, 0.7)])))
    assert [run.ttft_s(0.5) for run in runs] == pytest.approx([0.5, 0.7])


WRONG = {
    "sampled": (
        report(benchmark([entry(0, 1.0)], totals={"successful": 500})),
        "has 1 of 500 successful requests; let GuideLLM keep them all: .*sample_size",
    ),
    "newer": (report(version=3), "of version 3; known: .1, 2."),
    "empty": (report(), "without benchmarks"),
    "older": (report({"request_loader": {}, "requests": {}}), "before 0.4"),
    "no list": (report({**benchmark([]), "requests": 5}), r"benchmark 1: .*requests"),
    "odd times": (report(benchmark([entry(0, 3.0, -0.9)])), "a first token after -"),
    "odd": (report(benchmark([entry(0, 1.0, timings={"queued": "x"})])), r"Expected .*queued"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_report_is_refused(tmp_path, name):
    document, message = WRONG[name]
    with pytest.raises(ConfigError, match=message) as refused:
        read(tmp_path, document)
    assert "benchmarks.json" in str(refused.value)
