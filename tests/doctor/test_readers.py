"""Benchmark results, metrics and decision logs as facts."""

from __future__ import annotations

import json

import msgspec
import pytest

from headstart.bench.run import Request, Run
from headstart.doctor.diagnose import diagnose
from headstart.doctor.facts import Known
from headstart.doctor.readers import READERS, load


def run_file(path, ttft_s, *, has_cache=None, cached=None):
    requests = tuple(
        Request(
            session=str(n),
            prompt_tokens=1000,
            output_tokens=11,
            ttft_s=ttft_s * (1 + n / 1000),
            latency_s=ttft_s * (1 + n / 1000) + 1.0,
            cached_tokens=cached,
        )
        for n in range(100)
    )
    run = Run(
        tool="headstart",
        duration_s=50.0,
        requests=requests,
        has_prefix_cache=has_cache,
        pace={"rate": None, "concurrency": 8.0},
    )
    path.write_bytes(msgspec.json.encode(run))
    return path


def told(*paths):
    report = load(paths, READERS)
    return Known(report.facts), report.skipped


def test_a_run_is_an_arm(tmp_path):
    known, skipped = told(run_file(tmp_path / "a.json", 0.5, has_cache=True, cached=600))
    (arm,) = known.arms
    assert (arm.name, arm.text("cache"), skipped) == ("a", "on", ())
    assert arm.number("ttft_p50") == pytest.approx(0.5245)
    assert arm.number("hit_rate") == pytest.approx(0.6)
    assert arm.number("throughput") == pytest.approx(22)
    assert arm.number("concurrency") == 8
    assert arm.number("tpot") == pytest.approx(0.1)
    assert arm.fact("ttft_p90") is not None
    assert arm.fact("ttft_p99") is None  # of 100 requests it is one of them


def test_an_observations_file_says_what_a_run_does_not(tmp_path):
    off, hit = run_file(tmp_path / "off.json", 2.0), run_file(tmp_path / "hit.json", 6.0)
    known, skipped = told(off, hit)
    assert len(skipped) == 2
    assert "whether it had the cache" in skipped[0]
    assert diagnose(known).verdict == "cannot_say"
    more = tmp_path / "more.toml"
    more.write_text(
        '[[arms]]\nname = "off"\ncache = "off"\n[[arms]]\nname = "hit"\ncache = "warm"\n'
        '[[tiers]]\nname = "nas"\nkind = "network"\n'
    )
    known, _ = told(off, hit, more)
    assert diagnose(known).verdict == "slow_tier"


def test_averages_are_taken_where_there_is_nothing_else(tmp_path):
    path = tmp_path / "vllm.json"
    path.write_text(
        json.dumps(
            {
                "mean_ttft_ms": 900.0,
                "median_ttft_ms": 850.0,
                "p99_ttft_ms": 4000.0,
                "completed": 200,
                "total_input_tokens": 400_000,
                "duration": 60.0,
            }
        )
    )
    known, _ = told(path)
    assert known.arms[0].number("ttft_p99") == pytest.approx(4.0)
    assert known.arms[0].number("prompt_tokens") == 2000


def test_a_broken_result_is_skipped(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"ttfts": [1, 2')
    known, skipped = told(path)
    assert known.num_facts == 0
    assert "x.json" in skipped[0]


def metrics(requests, ttft_sum, queue_sum, hits, preemptions):
    return f"""# HELP vllm:time_to_first_token_seconds Histogram.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="1.0"}} {requests * 0.8}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="10.0"}} {requests * 1.0}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf"}} {requests * 1.0}
vllm:time_to_first_token_seconds_count{{engine="0"}} {requests}
vllm:time_to_first_token_seconds_sum{{engine="0"}} {ttft_sum}
vllm:request_queue_time_seconds_sum{{engine="0"}} {queue_sum}
vllm:request_queue_time_seconds_count{{engine="0"}} {requests}
vllm:prefix_cache_queries_total{{engine="0"}} {requests * 1000}
vllm:prefix_cache_hits_total{{engine="0"}} {hits}
vllm:num_preemptions_total{{engine="0"}} {preemptions}
vllm:kv_cache_usage_perc{{engine="0"}} 0.99
vllm:num_requests_running{{engine="0"}} 12
vllm:num_requests_running{{engine="1"}} 3
vllm:cache_config_info{{block_size="16",num_gpu_blocks="4000"}} 1.0
vllm:broken{{engine="0" 3 4 5 6
python_gc_objects_collected_total 5
"""


def test_metrics_between_two_snapshots(tmp_path):
    one, two = tmp_path / "1.prom", tmp_path / "2.prom"
    one.write_text(metrics(100, 50.0, 10.0, 60_000, 0))
    two.write_text(metrics(300, 450.0, 370.0, 200_000, 90))
    known, skipped = told(one, two)
    top = known.top
    assert top.number("num_requests") == 200
    assert top.number("ttft_mean") == pytest.approx(2.0)
    assert top.number("queue") == pytest.approx(1.8)
    assert top.number("hit_rate") == pytest.approx(0.7)
    assert top.number("ttft_p90") == pytest.approx(5.5)
    assert top.number("num_preemptions") == 90
    assert top.number("kv_usage") == 0.99
    assert top.number("running") == 12  # of the engine whose cache it is
    assert top.number("pool_tokens") == 64_000
    fact = top.fact("num_preemptions")
    assert str(fact.source).endswith("2.prom:12")
    assert len(skipped) == 2
    assert "no sample" in skipped[0]
    assert diagnose(known).verdict == "no_room"


def test_a_restart_between_two_snapshots_is_told(tmp_path):
    one, two = tmp_path / "1.prom", tmp_path / "2.prom"
    one.write_text(metrics(300, 450.0, 370.0, 200_000, 90))
    two.write_text(metrics(100, 50.0, 10.0, 60_000, 0))
    known, skipped = told(one, two)
    assert known.top.number("num_requests") == 100
    assert any("restart" in line for line in skipped)


def decision(loaded, load_s, prefill_s):
    return json.dumps(
        {
            "schema": "headstart.decision/1",
            "request_id": "r",
            "prompt_tokens": 4000,
            "loaded_tokens": loaded,
            "actual_load_s": load_s,
            "actual_prefill_s": prefill_s,
        }
    )


def test_decisions(tmp_path):
    path = tmp_path / "decisions.jsonl"
    lines = [decision(2000, 0.2, 1.0), decision(2000, 0.4, 1.0), decision(0, 0.0, 2.0), "{broken"]
    path.write_text("\n".join(lines) + "\n")
    known, skipped = told(path)
    assert known.top.number("num_requests") == 3
    assert known.top.number("load") == pytest.approx(0.2)  # over all three
    assert known.top.number("cached_tokens") == pytest.approx(4000 / 3)
    assert skipped == (f"{path}:4: no decision",)


def test_every_reader_leaves_the_others_files_alone(tmp_path):
    files = {
        "a.toml": "ttft_p50 = 1\n",
        "b.json": '{"median_ttft_ms": 3.0}',
        "c.prom": metrics(1, 1.0, 0.0, 0, 0),
        "d.jsonl": decision(1, 1.0, 1.0),
        "e.log": "INFO Engine 000: Running: 3 reqs\n",
    }
    from headstart.doctor.readers import Document

    for name, text in files.items():
        document = Document(path=name, text=text)
        knows = [reader.name for reader in READERS if reader.knows(document)]
        assert len(knows) == (name != "e.log")
