"""Summaries of one run, against figures worked out by hand."""

import json
import time

import msgspec
import pytest

from headstart.bench.slo import parse_slo
from headstart.bench.statistics import quantile
from headstart.bench.summary import document, error_kinds, figures, shown, summarise


def with_errors(run, errors):
    """A run whose first requests failed so."""
    requests = list(run.requests)
    for number, error in enumerate(errors):
        failed = {"error": error, "ttft_s": None, "latency_s": None, "output_tokens": 0}
        requests[number] = msgspec.structs.replace(requests[number], **failed)
    return msgspec.structs.replace(run, requests=tuple(requests))


def with_gaps(run, gaps):
    requests = tuple(msgspec.structs.replace(each, itl_s=gaps) for each in run.requests)
    return msgspec.structs.replace(run, requests=requests)


def test_quantiles_are_those_of_the_run(run):
    made = run(count=400)
    found = summarise(made)
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        ttft = found.times["ttft"].quantiles[name]
        assert ttft.value == made.ttft_s(share)
        assert ttft.low < ttft.value < ttft.high
        assert found.times["tpot"].quantiles[name].value == made.tpot_s(share)
        latencies = [each.latency_s for each in made.requests]
        assert found.times["latency"].quantiles[name].value == quantile(latencies, share)


def test_rates_hits_and_goodput(run):
    made = with_errors(run(1.0, count=40), ["HTTP 500: x"] * 4)
    found = summarise(made, parse_slo("ttft=1s"))
    good = made.good
    assert (found.num_requests, found.num_failed, found.num_sessions) == (40, 4, 20)
    assert found.requests_per_s == 3.6
    assert found.output_tokens_per_s == pytest.approx(36 * 11 / 10.0)
    assert found.input_tokens_per_s == pytest.approx(sum(r.prompt_tokens for r in good) / 10.0)
    assert found.hit_rate == pytest.approx(36 * 50 / sum(r.prompt_tokens for r in good))
    assert found.possible_hit_rate == made.simulated_hit_rate
    # Failures are requests that missed it.
    num_met = sum(r.ttft_s <= 1.0 for r in good)
    assert found.slo_share == num_met / 40
    assert found.goodput_per_s == pytest.approx(num_met / 10.0)
    none = summarise(made)
    assert (none.slo_share, none.goodput_per_s, document(none)["slo"]) == (None, None, None)


def test_times_between_tokens_are_taken_over_all_answers(run):
    gaps = tuple(n / 100 for n in range(1, 11))
    found = summarise(with_gaps(run(count=40), gaps)).times["itl"]
    assert found.num == 400
    assert found.quantiles["p50"].value == 0.05
    assert found.quantiles["p90"].value == 0.09
    assert summarise(run()).times["itl"].num == 0
    assert not any(title.startswith("ITL") for title, _ in figures(summarise(run())))


def test_too_few_answers_are_said_instead_of_a_number(run):
    found = summarise(run(count=40))
    assert found.times["ttft"].quantiles["p99"] is None
    told = dict(figures(found))
    assert told["TTFT p99, ms"] == "too few: 40 of 368"
    assert told["TTFT p50, ms"].startswith("1000.0 (")
    assert document(found)["ttft_s"]["p99"] is None
    few = dict(figures(summarise(run(count=3))))
    assert few["TTFT p50, ms"] == "1000.0", "a median, whose interval nobody knows"
    assert few["TTFT p90, ms"] == "too few: 3 of 36"


def test_errors_are_counted_by_kind(run):
    errors = [
        *["HTTP 429: slow down, request 17", "HTTP 429: slow down, request 18"],
        *["Cannot connect to host 10.0.0.1:8000", "Cannot connect to host 10.0.0.2:8001"],
        *["Cannot connect to host 10.0.0.3:8000", None],
    ]
    kinds = error_kinds(with_errors(run(), errors))
    assert kinds == {
        "Cannot connect to host #.#.#.#:#": 3,
        "HTTP 429": 2,
        "no first token": 1,
    }
    assert next(iter(kinds)).startswith("Cannot"), "the most frequent first"
    many = error_kinds(with_errors(run(), [f"kind {'x' * n}" for n in range(12)]))
    assert (len(many), many["others"]) == (9, 4)


def test_text_from_files_is_one_line_that_can_be_printed():
    assert shown("a\n\x1b[31mb\ud800\t c", 40) == "a [31mb c"
    assert shown("x" * 50, 10) == "x" * 9 + "…"


def test_a_run_in_which_all_failed_is_told(run):
    failed = with_errors(run(count=4), ["HTTP 500"] * 4)
    found = summarise(failed, parse_slo("ttft=1s"))
    assert (found.num_failed, found.slo_share, found.hit_rate) == (4, 0.0, None)
    told = dict(figures(found))
    assert told["failed"] == "4"
    assert "TTFT p50, ms" not in told
    json.dumps(document(found), allow_nan=False)


def test_a_client_that_sent_late_is_told(run):
    found = summarise(run(median_s=0.01))
    assert found.is_sent_late
    assert "too late" in dict(figures(found))["sent late, p99, ms"]
    assert not summarise(run(median_s=1.0)).is_sent_late


def test_the_document_is_json_and_says_what_a_preset_is_not(run):
    told = json.loads(json.dumps(document(summarise(run(), parse_slo("mlperf-llama2-70b-server")))))
    assert told["ttft_s"]["p50"].keys() == {"value", "low95", "high95"}
    assert told["slo"]["limits_s"] == {"ttft": 2.0, "tpot": 0.2}
    assert "not MLPerf" in told["slo"]["note"]


def test_ten_thousand_requests_take_no_time(run):
    made = with_gaps(run(count=10_000), (0.01,) * 31)
    started = time.perf_counter()
    summarise(made, parse_slo("ttft=1s"))
    assert time.perf_counter() - started < 3.0
