"""Logs of vLLM, SGLang and LMCache, in the forms in which they come."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.doctor.diagnose import diagnose
from headstart.doctor.facts import Known
from headstart.doctor.readers import base, load
from log_samples import PIECES, SGLANG, lmcache, v1


def told(tmp_path, *lines, name="engine.log"):
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    report = load([path])
    return Known(report.facts), report.skipped


def test_vllm(tmp_path):
    known, skipped = told(
        tmp_path,
        "(APIServer pid=71) INFO 10-07 02:48:01 [api_server.py:12] vLLM API server version 0.27.1",
        "(EngineCore pid=99) INFO 10-07 02:48:44 [kv_cache_utils.py:1447] GPU KV cache size: "
        "409,600 tokens, Maximum concurrency for 32,768 tokens per request: 12.50x",
        v1(0, 0, 0.0, 0.0, generation=0.0),
        v1(40, 0, 71.0, 30.0, 10.0, generation=900.0),
        v1(33, 60, 99.1, 41.0, 20.0, more=", Deferred: 2 reqs, Preemptions: 3"),
        v1(31, 70, 99.8, 40.0, 25.0, more=", Preemptions: 4"),
        v1(30, 80, 97.0, 40.0, 25.0),
        '(APIServer pid=71) INFO:     10.0.0.7:40112 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        '(APIServer pid=71) INFO:     10.0.0.7:40113 - "POST /v1/completions HTTP/1.1" 400 Bad',
        '(APIServer pid=71) INFO:     10.0.0.7:40113 - "POST /tokenize HTTP/1.1" 200 OK',
    )
    top = known.top
    assert skipped == ()
    assert (top.text("engine"), top.text("engine_version")) == ("vllm", "0.27.1")
    assert top.numbers("pool_tokens", "max_model_len") == (409_600, 32_768)
    assert top.numbers("running", "waiting", "kv_usage") == (31, 70, 0.998)  # of one line
    assert str(top.fact("waiting").source).endswith("engine.log:6")
    assert top.number("num_preemptions") == 7
    assert top.number("num_requests") == 1
    assert top.number("throughput") == pytest.approx((900 + 3 * 500) / 4)  # the busy lines
    assert top.number("local_hit_rate") == pytest.approx(0.4)
    assert top.number("external_hit_rate") == pytest.approx(0.25)
    assert top.number("hit_rate") == pytest.approx(1 - 0.6 * 0.75)
    assert diagnose(known).verdict == "no_room"


def test_what_waits_for_a_load_does_not_wait_for_room(tmp_path):
    line = v1(2, 9, 20.0, 10.0, 80.0, more=", Deferred: 8 reqs, KV fetch: 1 waiting to start")
    top = told(tmp_path, line)[0].top
    assert top.numbers("running", "waiting") == (2, 1)
    line = line.replace("Deferred: 8", "Deferred: 9")
    assert diagnose(told(tmp_path, *[line] * 9)[0]).findings == ()


def test_a_passing_queue_is_no_queue(tmp_path):
    lines = [v1(8, 0, 35.0, 0.0) for _ in range(9)] + [v1(8, 50, 10.0, 0.0), v1(8, 0, 42.0, 0.0)]
    top = told(tmp_path, *lines)[0].top
    assert top.fact("waiting") is None
    assert top.number("kv_usage") == pytest.approx(0.42)


def test_another_device(tmp_path):
    line = v1(3, 5, 88.0, 12.0).replace("GPU KV", "CPU KV")
    assert told(tmp_path, line)[0].top.number("kv_usage") == pytest.approx(0.88)


def test_v0(tmp_path):
    warning = (
        "WARNING 11-27 02:04:48 scheduler.py:1481] Sequence group cmpl-5-0 is preempted by "
        "PreemptionMode.SWAP mode because there is not enough KV cache space. This can affect the "
        "end-to-end performance. total_num_cumulative_preemption="
    )
    known, skipped = told(
        tmp_path,
        "INFO 11-24 03:09:29 metrics.py:386] Avg prompt throughput: 1514.3 tokens/s, Avg "
        "generation throughput: 313.4 tokens/s, Running: 35 reqs, Swapped: 2 reqs, Pending: 95 "
        "reqs, GPU KV cache usage: 95.0%, CPU KV cache usage: 12.0%.",
        "INFO 11-24 03:09:29 metrics.py:402] Prefix cache hit rate: GPU: 62.26%, CPU: 0.00%",
        warning + "1",
        warning + "51",
        warning + "1",  # of the next process
    )
    top = known.top
    assert skipped == ()
    assert top.numbers("running", "waiting", "kv_usage") == (35, 97, 0.95)
    assert top.number("hit_rate") == pytest.approx(0.6226)
    assert top.number("num_preemptions") == 52
    assert str(top.fact("num_preemptions").source).endswith("engine.log:5")


def test_two_records_on_one_line(tmp_path):
    one = v1(3, 9, 50.0, 12.0)
    known, _ = told(tmp_path, one + v1(4, 8, 60.0, 14.0, engine=1) + one)
    assert {each.name: each.number("running") for each in known.workers} == {
        "engine 0": 3,
        "engine 1": 4,
    }


WRAPPED = {
    "colours": lambda line: "\x1b[1;36m(APIServer pid=1)\x1b[0;0m \x1b[32m" + line + "\x1b[0m",
    "docker": lambda line: "2026-03-01T10:11:12.123456789Z stderr F " + line,
    "compose": lambda line: "vllm-1  | " + line,
    "json-file": lambda line: json.dumps({"log": f"\x1b[32m{line}\n", "stream": "stderr"}),
    "loki": lambda line: json.dumps({"ts": "2026", "line": line, "labels": {"pod": "a"}}),
}


@pytest.mark.parametrize("how", WRAPPED)
def test_what_is_around_a_line_does_not_matter(tmp_path, how):
    wrap = WRAPPED[how]
    access = 'INFO:     10.0.0.7:40112 - "POST /v1/completions HTTP/1.1" 200 OK'
    known, skipped = told(tmp_path, wrap(v1(3, 9, 50.0, 12.0, 40.0)), wrap(access))
    assert skipped == ()
    assert known.top.numbers("running", "waiting", "kv_usage") == (3, 9, 0.5)
    assert known.top.numbers("local_hit_rate", "external_hit_rate") == (0.12, 0.4)
    assert known.top.number("num_requests") == 1


def test_engines_of_unequal_load(tmp_path):
    lines = []
    for _ in range(5):
        lines.append(v1(60, 20, 97.0, 5.0, engine=0))
        lines += [v1(2, 0, 8.0, 90.0, engine=number) for number in (1, 2)]
    known, _ = told(tmp_path, *lines)
    full = known.workers[0]
    assert full.numbers("running", "waiting", "hit_rate") == (60, 20, 0.05)
    assert any(finding.rule == "skew" for finding in diagnose(known).findings)


def test_a_hit_rate_that_falls_while_the_cache_is_full(tmp_path):
    lines = [v1(20, 0, 96.0, rate) for rate in [90.0] * 10 + [60.0] * 10 + [12.0] * 10]
    assert told(tmp_path, *lines)[0].top.numbers("hit_rate_first", "hit_rate_last") == (
        pytest.approx(0.9),
        pytest.approx(0.12),
    )
    lines = [line.replace("96.0%", "26.0%") for line in lines]  # then the load is another one
    assert told(tmp_path, *lines)[0].top.fact("hit_rate_last") is None


def test_transfers_of_vllm(tmp_path):
    start = "INFO 10-07 02:50:27 [metrics.py:101] KV Transfer metrics: "
    known, skipped = told(
        tmp_path,
        start + "GPU_to_CPU_total_bytes=8000000000, GPU_to_CPU_total_time=1.5, "
        "CPU_to_GPU_total_bytes=2000000000, CPU_to_GPU_total_time=0.1",
        start + "CPU_to_GPU_total_bytes=2000000000, CPU_to_GPU_total_time=0.3",
        start + "Num successful transfers=10, Avg xfer time (ms)=20.0, P90 xfer time (ms)=31.2, "
        "Avg MB per transfer=100.0, Throughput (MB/s)=5000.0",
        start + "vllm:kv_offload_tiering_read_bytes:('1:fs',)=3000000000, "
        "vllm:kv_offload_tiering_read_time:('1:fs',)=6.0",
        "WARNING 10-07 02:48:44 [host_register.py:55] cudaHostRegister failed (code=2) - transfers "
        "will still work but may be slower (unpinned DMA)",
    )
    tiers = {each.name: each for each in known.tiers}
    assert skipped == ()
    assert tiers["host memory"].numbers("read", "written") == (4e9, 8e9)
    assert tiers["host memory"].number("bandwidth") == pytest.approx(1e10)
    assert tiers["nixl"].number("bandwidth") == pytest.approx(5000 * 2**20)
    assert tiers["1:fs"].number("bandwidth") == pytest.approx(5e8)
    assert known.top.says("pinned", False)


def test_loads_that_failed(tmp_path):
    known, _ = told(
        tmp_path,
        "WARNING [scheduler.py:9] Recovered from KV load failure: 3 request(s) rescheduled (90 "
        "tokens affected).",
        "ERROR [scheduler.py:5] Failing 2 request(s) due to KV load failure (failure_policy=fail, "
        "9 tokens affected). Request IDs: {'a', 'b'}",
        v1(1, 0, 3.0, 5.0),
    )
    assert known.tiers[0].number("num_failed_reads") == 5


def test_transfers_of_the_flat_names(tmp_path):
    known, _ = told(
        tmp_path,
        "KV Transfer metrics: vllm:kv_offload_load_bytes=6e9, vllm:kv_offload_load_time=0.5, "
        "vllm:kv_offload_total_bytes:('CPU_to_GPU',)=6000000000, vllm:kv_offload_store_bytes=10",
    )
    assert known.tiers[0].number("read") == 6e9
    assert known.tiers[0].number("bandwidth") == pytest.approx(1.2e10)


def test_headstarts_own_sums(tmp_path):
    line = (
        "KV Transfer metrics: lookups=9, hits=4, load_bytes=4000, wait_seconds=1.0, "
        "load_copy_seconds=0.2"
    )
    top = told(tmp_path, line)[0].top
    assert top.text("connector") == "headstart"
    assert top.number("load") == pytest.approx(1.2 / 9)  # over all, with a hit or without
    assert top.number("load_nbytes") == pytest.approx(4000 / 9)


@pytest.mark.parametrize("year", SGLANG)
def test_sglang(tmp_path, year):
    retracted = (
        "[x] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 9"
    )
    known, skipped = told(tmp_path, *SGLANG[year], *SGLANG[year], retracted, retracted)
    top = known.top
    assert skipped == ()
    assert top.text("engine") == "sglang"
    assert top.number("hit_rate") == pytest.approx(0.25)
    assert top.numbers("num_hits", "num_queries") == (200, 800)
    assert top.number("num_preemptions") == 4
    assert top.number("throughput") == 800
    assert top.numbers("running", "waiting", "kv_usage") in ((20, 70, 0.91), (21, 69, 0.93))
    assert diagnose(known).verdict == "no_room"


def test_many_decode_batches(tmp_path, monkeypatch):
    from headstart.doctor.readers import log_sglang

    monkeypatch.setattr(log_sglang, "_MANY", 4)
    line = SGLANG["2026"][1]
    lines = [line] * 4 + [line.replace("800.00", "0.00")] * 80
    assert told(tmp_path, *lines)[0].top.number("throughput") == pytest.approx(4 * 800 / 14)


def test_ranks_of_sglang(tmp_path):
    line = SGLANG["2025"][0]
    ranks = [line.replace("TP0", rank) for rank in ("DP0 TP0", "DP0 TP1", "DP1 TP0", "DP1 TP1")]
    known, _ = told(tmp_path, *ranks)
    assert known.top.number("num_hits") == 200  # the second TP rank says the same again
    assert sorted(each.name for each in known.workers) == ["dp 0", "dp 1"]


def test_requests_and_prefetches_of_sglang(tmp_path):
    times = (
        "ReqTimeStats(rid=a{}, input_len=4000, cached_input_len=1000, output_len=10, "
        "type=unified): queue_duration={}ms, forward_duration=90.0ms"
    )
    known, _ = told(
        tmp_path,
        "[t] max_total_num_tokens=655360, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        "max_running_requests=128, context_len=32768, available_gpu_mem=7.5 GB",
        *(times.format(number, 100 * number) for number in (1, 2, 9)),
        "[t] Prefetching 20 pages for request abc",
        "[t] Prefetch abc completed with 640 tokens",
        "[t] Prefetch operation abc failed to retrieve page 0f.",
        "[t] Prefetch operation abc failed to retrieve page 1f.",
        "[t] Download completed with 3 tokens",
        SGLANG["2026"][1],
    )
    top = known.top
    assert top.numbers("pool_tokens", "max_num_seqs", "max_model_len") == (655_360, 128, 32_768)
    assert top.number("queue") == pytest.approx(0.2)
    assert top.numbers("prompt_tokens", "cached_tokens", "num_requests") == (4000, 1000, 3)
    (tier,) = known.tiers
    assert tier.numbers("num_found", "num_failed_reads", "delivered") == (20, 2, 640)
    assert any(finding.rule == "failed_reads" for finding in diagnose(known).findings)


def test_lmcache(tmp_path):
    hit = "Reqid: r{}, Total tokens 1000, LMCache hit tokens: {}, need to load: {}"
    moved = (
        "Retrieved 512 out of 512 required tokens (from 1000 total tokens). size: {} {}, cost {} "
        "ms, throughput: {} GB/s;"
    )
    known, skipped = told(
        tmp_path,
        lmcache(hit.format(1, 800, 600)),
        lmcache(hit.format(1, 800, 600)),  # it waits, and is asked again
        lmcache(hit.format(2, 100, -300)),  # the engine holds 400
        lmcache(
            "Reqid: r3, Total tokens 1000, Inference Engine computed tokens: 0, LMCache hit "
            "tokens: 0, need to load: 0"
        ),
        lmcache("Reqid: r4, Total tokens 9, LMCache hit tokens: None."),
        lmcache(moved.format("0.5000", "gb", "100.0000", "5.0000"), rank=0),
        lmcache(moved.format("0.5000", "GB", "250.0000", "0.0020"), rank=1),
        lmcache(
            "[req_id=x] Stored 24 out of total 24 tokens. size: 1.0000 GiB, cost 9.0 ms, "
            "throughput: 111.1 GB/s; offload_time: 5.0 ms, put_time: 4.0 ms"
        ),
        lmcache("Stored in a folder of its own"),
        *[
            lmcache("Failed to allocate memory for the KV cache.").replace("INFO", "WARNING")
            for _ in range(12)
        ],
    )
    top = known.top
    assert skipped == ()
    assert top.numbers("num_requests", "prompt_tokens") == (3, 1000)
    assert top.numbers("found_tokens", "load_tokens") == (300, 200)
    assert top.number("local_hit_rate") == pytest.approx(600 / 3000)
    assert top.number("external_hit_rate") == pytest.approx(600 / 2400)
    assert top.number("hit_rate") == pytest.approx(0.4)
    assert top.number("load") == pytest.approx(0.1 / 3)  # one of the three requests loads
    assert top.number("kv_bytes_per_token") == pytest.approx(2 * 2**29 / 512)
    (tier,) = known.tiers
    assert tier.number("bandwidth") == pytest.approx(2**29 / 0.1 + 2**29 / 0.25)
    assert tier.numbers("read", "written") == (2**30, 2**30)
    (line,) = known.log_rates
    assert line.numbers("size", "time") == (2**29, 0.25)
    found = {finding.rule for finding in diagnose(known).findings}
    assert {"printed_rate", "starved_pool"} <= found


def test_a_cache_that_holds_what_the_engine_has(tmp_path):
    line = "Reqid: r{}, Total tokens 15900, LMCache hit tokens: 15444, need to load: 3"
    known, _ = told(tmp_path, *(lmcache(line.format(number)) for number in range(5)))
    assert any(finding.rule == "tier_unused" for finding in diagnose(known).findings)


def test_lines_of_another_form_are_told(tmp_path):
    known, skipped = told(
        tmp_path,
        "INFO Engine 000: Avg prompt throughput: n/a",
        v1(1, 0, 3.0, 5.0),
        "Decode batch, nothing more",
        "Reqid: 7 is late",
        "\xff\xfe binary",
    )
    assert known.top.number("local_hit_rate") == pytest.approx(0.05)
    assert len(skipped) == 1
    assert "engine.log:1: 3 lines of a form that is not known" in skipped[0]


def test_lines_across_blocks_and_gzip(tmp_path, monkeypatch):
    path = tmp_path / "x.log.gz"
    lines = ["noise"] * 3 + [v1(3, 9, 50.0, 12.0), "noise", v1(4, 9, 60.0, 12.0, engine=1)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    for size in (7, 64, 1000):
        monkeypatch.setattr(base, "_BLOCK_NBYTES", size)
        known = Known(load([path]).facts)
        assert [str(each.fact("running").source) for each in known.workers] == [
            f"{path}:4",
            f"{path}:6",
        ]


def test_what_is_no_log_is_not_read_whole(monkeypatch):
    from headstart.doctor.readers import logs

    reader = logs.LogsReader()
    assert not reader.knows(base.Document(path="w.bin", text="\0weights " + v1(3, 9, 50.0, 12.0)))
    monkeypatch.setattr(logs, "_KNOWN_WITHIN", 100)
    monkeypatch.setattr(base, "_BLOCK_NBYTES", 50)
    late = base.Document(path="x.log", text="x" * 500 + v1(3, 9, 50.0, 12.0))
    assert not reader.knows(late)


def test_a_line_without_an_end(tmp_path, monkeypatch):
    from headstart.doctor.readers import loglines

    monkeypatch.setattr(loglines, "_LONGEST", 500)
    monkeypatch.setattr(base, "_BLOCK_NBYTES", 64)
    path = tmp_path / "x.log"
    path.write_text("LMCache INFO" + "x" * 1000 + "\n" + v1(3, 9, 50.0, 12.0) + "\n")
    assert str(Known(load([path]).facts).top.fact("running").source) == f"{path}:2"


def test_healthy_engines_are_not_accused(tmp_path):
    lines = [v1(n % 9, n % 2, 20.0 + n % 30, 60.0, 30.0, engine=n % 2) for n in range(60)]
    lines += [
        lmcache(
            "Retrieved 512 out of 512 tokens. size: 0.5 gb, cost 50.0 ms, throughput: 10 GB/s;"
        ),
        lmcache("Stored 512 out of 512 tokens. size: 90.5 gb, cost 9000.0 ms, throughput: 10 GB/s"),
        lmcache("Reqid: r1, Total tokens 1000, LMCache hit tokens: 800, need to load: 600"),
    ]
    assert diagnose(told(tmp_path, *lines)[0]).findings == ()


@given(pieces=st.lists(PIECES, max_size=12), between=st.sampled_from(["\n", "", "\r\n", "\r"]))
def test_nothing_in_a_log_is_fatal(pieces, between):
    document = base.Document(path="x.log", text="LMCache INFO\n" + between.join(pieces))
    report = load([document])
    for fact in report.facts:
        assert not isinstance(fact.value, float) or 0.0 <= fact.value < float("inf")
        assert str(fact)
    diagnose(Known(report.facts))
