"""Metrics of SGLang, LMCache and Headstart, names over the versions, resets, several servers."""

from __future__ import annotations

import re

import pytest

from headstart.doctor.diagnose import diagnose
from headstart.doctor.facts import Known
from headstart.doctor.readers import Document, load
from headstart.metrics import Metrics
from headstart.store import StoreStats
from headstart.types import TierStats


def told(*texts, origins=None):
    documents = [
        Document(path=f"{n}.prom", text=text, origin=(origins or [""] * len(texts))[n])
        for n, text in enumerate(texts)
    ]
    report = load(documents)
    return Known(report.facts), report.skipped


def histogram(name, count, total, labels="", buckets=()):
    start = f"{labels}," if labels else ""
    lines = [f'{name}_bucket{{{start}le="{bound}"}} {n}' for bound, n in buckets]
    lines += [f"{name}_sum{{{labels}}} {total}", f"{name}_count{{{labels}}} {count}"]
    return "\n".join(lines) + "\n"


VLLM = """# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="a b"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="a b"} 400.0
vllm:external_prefix_cache_queries_total{engine="0",model_name="a b"} 600.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="a b"} 300.0
vllm:num_preemptions_total{engine="0",model_name="a b"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="a b"} 0.5
"""


RENAMED = {
    "as it is": lambda text: text,
    "no _total": lambda text: text.replace("_total{", "{"),
    "no colon": lambda text: text.replace("vllm:", "vllm_"),
    "ray": lambda text: text.replace("vllm:", "ray_vllm_"),
    "old": lambda text: text.replace("vllm:prefix", "vllm:gpu_prefix").replace("kv_c", "gpu_c"),
    "with times": lambda text: re.sub(r"(\d)\n", r"\1 1700000000000\n", text),
    "other line ends": lambda text: text.replace("\n", "\r\n"),
}


@pytest.mark.parametrize("how", RENAMED)
def test_names_over_the_versions(how):
    known, skipped = told(RENAMED[how](VLLM))
    assert skipped == ()
    assert known.top.number("local_hit_rate") == pytest.approx(0.4)
    assert known.top.number("external_hit_rate") == pytest.approx(0.5)
    assert known.top.number("hit_rate") == pytest.approx(0.7)
    assert known.top.numbers("num_preemptions", "kv_usage") == (7, 0.5)


def test_offloading_of_vllm():
    text = """vllm:kv_offload_load_bytes_total{engine="0"} 6e9
vllm:kv_offload_load_time_total{engine="0"} 0.5
vllm:kv_offload_store_bytes_total{engine="0"} 1e10
vllm:kv_offload_allocation_failure_total{engine="0"} 40
vllm:kv_offload_tiering_read_bytes_total{engine="0",tier="1:fs"} 3e9
vllm:kv_offload_tiering_read_time_total{engine="0",tier="1:fs"} 6
vllm:kv_offload_tiering_write_bytes_total{engine="0",tier="1:fs"} 9e9
"""
    text += histogram("vllm:kv_offload_lookup_sync_delay_seconds", 10, 0.05)
    known, _ = told(text)
    tiers = {each.name: each for each in known.tiers}
    assert tiers["host memory"].numbers("read", "written", "bandwidth") == (6e9, 1e10, 1.2e10)
    assert tiers["1:fs"].numbers("read", "written", "bandwidth") == (3e9, 9e9, 5e8)
    assert known.top.numbers("lookup", "num_alloc_failures") == (0.005, 40)


def sglang(requests, queue_sum, device, host, computed, *, retracted=0):
    labels = 'model_name="m",tp_rank="0"'
    return (
        histogram(
            "sglang:time_to_first_token_seconds",
            requests,
            2.0 * requests,
            labels,
            [("1.0", requests * 0.8), ("10.0", requests), ("+Inf", requests)],
        )
        + histogram("sglang:queue_time_seconds", requests, queue_sum, labels)
        + histogram(
            "sglang:per_stage_req_latency_seconds",
            requests,
            0.1 * requests,
            labels + ',stage="prefill_forward"',
        )
        + histogram(
            "sglang:per_stage_req_latency_seconds",
            requests,
            9 * requests,
            labels + ',stage="request_process"',
        )
        + f"""sglang:prefill_effective_tokens_total{{{labels},mode="input"}} {computed}
sglang:prefill_effective_tokens_total{{{labels},mode="device_hit"}} {device}
sglang:prefill_effective_tokens_total{{{labels},mode="host_hit"}} {host}
sglang:num_retracted_requests_total{{{labels}}} {retracted}
sglang:num_running_reqs{{{labels}}} 20
sglang:num_running_reqs{{model_name="m",tp_rank="1"}} 20
sglang:num_queue_reqs{{{labels}}} 70
sglang:token_usage{{{labels}}} 0.96
sglang:max_total_num_tokens{{{labels}}} 655360
sglang:page_size{{{labels}}} 64
sglang:load_back_bytes_total{{{labels}}} 5e9
sglang:load_back_bytes_total{{model_name="m",tp_rank="1"}} 5e9
"""
    )


def test_sglang():
    known, skipped = told(
        sglang(100, 10.0, 1000, 0, 9000), sglang(500, 730.0, 3000, 2000, 14_000, retracted=30)
    )
    top = known.top
    assert skipped == ()
    assert top.text("engine") == "sglang"
    assert top.numbers("num_requests", "ttft_mean") == (400, 2.0)
    assert top.number("queue") == pytest.approx(1.8)
    assert top.number("prefill") == pytest.approx(0.1)
    assert top.number("ttft_p90") == pytest.approx(5.5)
    assert top.number("local_hit_rate") == pytest.approx(2000 / 9000)
    assert top.number("external_hit_rate") == pytest.approx(2000 / 7000)
    assert top.number("hit_rate") == pytest.approx(4000 / 9000)
    assert top.numbers("running", "waiting", "kv_usage") == (20, 70, 0.96)
    assert top.numbers("pool_tokens", "block_size", "num_preemptions") == (655_360, 64, 30)
    assert known.tiers[0].number("read") == 0  # bytes are of each rank; they did not grow
    assert diagnose(known).verdict == "no_room"


def test_bytes_of_sglang_are_of_all_ranks():
    assert told(sglang(1, 1.0, 1, 1, 1))[0].tiers[0].number("read") == 1e10


def test_cached_tokens_of_sglang():
    text = 'sglang:prompt_tokens_total{a="b"} 4000\nsglang:cached_tokens_total{a="b"'
    assert told(text + "} 1000\n")[0].top.number("hit_rate") == 0.25
    parts = "".join(
        text.partition("\n")[2] + f',cache_source="{source}"}} {n}\n'
        for source, n in (("device", 600), ("host", 400), ("total", 1000))
    )
    known, _ = told(text.partition("\n")[0] + "\n" + parts)
    assert known.top.numbers("hit_rate", "num_hits") == (0.25, 1000)


@pytest.mark.parametrize("prefix", ["lmcache:", "lmcache_"])
def test_lmcache(prefix):
    labels = 'model_name="m",worker_id="0",role="worker"'
    text = "".join(
        f"{prefix}{name}{{{labels}}} {value}\n"
        for name, value in (
            ("num_lookup_requests_total", 10),
            ("num_lookup_tokens_total", 10_000),
            ("num_lookup_hits_total", 4000),
            ("num_remote_read_bytes_total", 10),
            ("num_remote_write_bytes_total", 5e9),
            ("local_cache_usage", 2e9),
            ("retrieve_hit_rate", "NaN"),
        )
    )
    buckets = [("0.1", 150), ("0.5", 199), ("+Inf", 200)]
    text += histogram(prefix + "time_to_retrieve", 200, 16.0, labels, buckets)
    text += histogram(prefix + "time_to_lookup", 10, 0.02, labels)
    text += histogram(prefix + "remote_time_to_get", 10, 250.0, labels)
    known, skipped = told(text)
    assert skipped == ()
    assert known.top.text("connector") == "lmcache"
    assert known.top.numbers("found_tokens", "lookup", "load") == (400, 0.002, 0.08)
    assert known.top.number("load_p99") == pytest.approx(0.1 + 0.4 * 48 / 49)
    tiers = {each.name: each for each in known.tiers}
    assert tiers["lmcache remote"].numbers("read", "written", "latency") == (10, 5e9, 0.025)
    assert tiers["lmcache memory"].number("reported_used") == 2e9
    assert diagnose(known).findings == ()  # nobody says that anything could be read there


def test_the_multiprocess_lmcache():
    known, _ = told(
        "lmcache_mp_lookup_requested_tokens_total 100\nlmcache_mp_lookup_hit_tokens_total 50\n"
        "lmcache_mp_l1_memory_usage_bytes 1e9\n"
    )
    assert known.top.text("connector") == "lmcache"
    assert known.tiers[0].number("reported_used") == 1e9


def test_a_node_of_headstart():
    sizes = {"capacity_nbytes": 10_000, "used_nbytes": 100, "num_blocks": 1}
    tiers = {
        "memory": TierStats(name="memory", **sizes),
        "disk": TierStats(name="disk", read_nbytes=5_000, written_nbytes=9_000, **sizes),
    }
    stats = StoreStats(tiers=tiers, num_loads=0, num_late=0, num_writes_skipped=0, queued_nbytes=0)
    metrics = Metrics(lambda: stats, dict, dict)
    for _ in range(4):
        metrics.lookup(0.002)
    known, skipped = told(metrics.text().decode())
    assert skipped == ()
    assert known.top.text("connector") == "headstart"
    assert known.top.number("lookup") == pytest.approx(0.002)
    assert {each.name for each in known.tiers} == {"memory", "disk"}
    disk = next(each for each in known.tiers if each.name == "disk")
    assert disk.numbers("read", "written") == (5_000, 9_000)


def test_the_connector_of_headstart():
    known, _ = told(
        'headstart:lookups_total{engine="0"} 9\nheadstart:hits_total{engine="0"} 4\n'
        'headstart:load_bytes_total{engine="0"} 4000\n'
        'headstart:wait_seconds_total{engine="0"} 1.0\n'
        'headstart:load_copy_seconds_total{engine="0"} 0.2\n'
    )
    assert known.top.number("load") == pytest.approx(1.2 / 9)  # over all, with a hit or without
    assert known.top.number("load_nbytes") == pytest.approx(4000 / 9)


def test_counters_over_three_snapshots_with_a_restart():
    texts = [
        histogram("vllm:time_to_first_token_seconds", count, total)
        for count, total in ((100, 100.0), (300, 500.0), (50, 50.0))
    ]
    known, skipped = told(*texts)
    assert known.top.number("num_requests") == 200 + 50
    assert known.top.number("ttft_mean") == pytest.approx(450 / 250)
    assert len(skipped) == 1
    assert "restart" in skipped[0]


def test_snapshots_are_put_in_order_by_the_start_of_the_process():
    def text(start, count):
        return f"process_start_time_seconds {start}\n" + histogram(
            "vllm:time_to_first_token_seconds", count, count
        )

    known, _ = told(text(2e9, 10), text(1e9, 100))
    assert known.top.number("num_requests") == 10


def test_a_series_that_comes_later_was_zero_before():
    head = 'vllm:num_requests_running{engine="0"} 1\n'
    known, _ = told(head, head + 'vllm:num_preemptions_total{engine="0"} 5\n')
    assert known.top.number("num_preemptions") == 5
    # Another program's metrics in between are no snapshot of vLLM.
    texts = (
        'vllm:num_preemptions_total{engine="0"} 5\n',
        "headstart:hits_total 10\n",
        'vllm:num_preemptions_total{engine="0"} 6\n',
        "headstart:hits_total 12\nheadstart:load_copy_seconds_total 9\n",
    )
    known, _ = told(*texts)
    assert known.top.number("num_preemptions") == 1
    assert known.top.number("load") == pytest.approx(4.5)


def test_several_servers():
    def text(running, waiting):
        return f"vllm:num_requests_running 1.0{running}\nvllm:num_requests_waiting {waiting}\n"

    known, _ = told(text(1, 0), text(9, 60), text(2, 0), origins=["a", "b", "c"])
    assert [each.name for each in known.workers] == ["a", "b", "c"]
    assert known.top.number("waiting") == 60  # of the one with most requests
    assert any(finding.rule == "skew" for finding in diagnose(known).findings)
    known, _ = told(text(1, 0), text(9, 60))  # two snapshots of one server
    assert known.workers == ()


def test_engines_behind_one_port():
    text = "".join(
        f'vllm:num_requests_running{{engine="{n}"}} {n * 40}\n'
        f'vllm:num_requests_waiting{{engine="{n}"}} 0\n'
        f'vllm:prefix_cache_queries_total{{engine="{n}"}} 100\n'
        f'vllm:prefix_cache_hits_total{{engine="{n}"}} {n * 50}\n'
        for n in range(2)
    )
    known, _ = told(text)
    assert [each.name for each in known.workers] == ["engine 0", "engine 1"]
    assert known.workers[1].numbers("running", "hit_rate") == (40, 0.5)


def test_a_healthy_server_is_not_accused():
    text = (
        VLLM.replace('preemptions_total{engine="0",model_name="a b"} 7.0', "x_total 0")
        + histogram("vllm:time_to_first_token_seconds", 400, 80.0)
        + histogram("vllm:request_queue_time_seconds", 400, 4.0)
        + histogram("vllm:request_prefill_time_seconds", 400, 70.0)
        + 'vllm:kv_offload_store_bytes_total{engine="0"} 1e12\n'
        + 'vllm:kv_offload_load_bytes_total{engine="0"} 0\n'
        + 'vllm:num_requests_running{engine="0"} 6\nvllm:num_requests_waiting{engine="0"} 0\n'
        + 'vllm:num_requests_running{engine="1"} 4\nvllm:num_requests_waiting{engine="1"} 1\n'
    )
    assert diagnose(told(text)[0]).findings == ()


@pytest.mark.parametrize("text", [VLLM, sglang(400, 10.0, 1000, 10, 9000)], ids=["vllm", "sglang"])
def test_a_line_that_is_missing_or_cut_is_not_fatal(text):
    text += histogram("vllm:time_to_first_token_seconds", 400, 80.0, "", [("1.0", 9), ("+Inf", 9)])
    lines = text.splitlines()
    for number, line in enumerate(lines):
        for cut in ("", line[: len(line) // 2]):
            known, _ = told("\n".join((*lines[:number], cut, *lines[number + 1 :])))
            diagnose(known)
