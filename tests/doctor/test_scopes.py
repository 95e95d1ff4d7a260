"""What is of one engine, rank, model or run is not taken for all of them."""

from __future__ import annotations

import pytest

from headstart.doctor.diagnose import diagnose
from headstart.doctor.facts import Known
from headstart.doctor.readers import Document, load


def told(*texts, name="m.prom", origins=None):
    documents = [
        Document(path=f"{n}{name}", text=text, origin=origins[n] if origins else "")
        for n, text in enumerate(texts)
    ]
    report = load(documents)
    return Known(report.facts), report.skipped


def mean(name, count, value, labels):
    return f"{name}_sum{{{labels}}} {count * value}\n{name}_count{{{labels}}} {count}\n"


def vllm(running, waiting, usage, *, engine=0, model="a", requests=100, ttft=0.5, more=""):
    labels = f'engine="{engine}",model_name="{model}"{more}'
    return (
        f"vllm:num_requests_running{{{labels}}} {running}\n"
        f"vllm:num_requests_waiting{{{labels}}} {waiting}\n"
        f"vllm:kv_cache_usage_perc{{{labels}}} {usage}\n"
        f'vllm:cache_config_info{{{labels},block_size="16",num_gpu_blocks="{1000 + engine}"}} 1\n'
        + mean("vllm:time_to_first_token_seconds", requests, ttft, labels)
    )


def test_queue_and_room_are_of_one_engine():
    known, _ = told(vllm(4, 0, 0.97, engine=0) + vllm(20, 50, 0.3, engine=1))
    assert known.top.numbers("running", "waiting", "kv_usage") == (20, 50, 0.3)
    assert known.top.number("pool_tokens") == 16 * 1001
    assert known.top.number("num_requests") == 200  # counters are of both
    # Fifty wait for a cache of which a third is in use: there is room.
    assert "no_room" not in [each.cause for each in diagnose(known).findings]


def test_what_waits_for_a_load_does_not_wait_for_room():
    reasons = "".join(
        f'vllm:num_requests_waiting_by_reason{{engine="0",reason="{why}"}} {number}\n'
        for why, number in (("capacity", 2), ("deferred", 28))
    )
    known, _ = told(vllm(9, 30, 0.2) + reasons)
    assert known.top.numbers("running", "waiting") == (9, 2)
    assert diagnose(known).findings == ()


def test_engines_of_a_federation_and_of_ray():
    for label in ("instance", "pod", "ReplicaId"):
        text = vllm(40, 30, 0.9, more=f',{label}="one"') + vllm(1, 0, 0.1, more=f',{label}="two"')
        known, _ = told(text)
        assert [each.name for each in known.workers] == [
            f"{label.lower()} one",
            f"{label.lower()} two",
        ]
        assert known.top.number("kv_usage") == 0.9


def test_an_engine_that_has_gone_says_no_more():
    both = vllm(4, 0, 0.2, engine=0) + vllm(20, 50, 0.3, engine=1)
    known, _ = told(both, vllm(5, 1, 0.2, engine=0))
    assert known.top.numbers("running", "waiting") == (5, 1)
    assert known.workers == ()


def test_the_model_that_is_asked_most_speaks():
    chat = vllm(30, 2, 0.5, requests=900, ttft=0.4)
    small = vllm(0, 0, 0.0, engine=1, model="embedder", requests=9, ttft=0.01)
    known, skipped = told(chat + small)
    assert known.top.number("ttft_mean") == pytest.approx(0.4)
    assert known.top.number("num_requests") == 900
    assert known.workers == ()  # a router cannot give one's requests to the other
    assert ["embedder" in line for line in skipped] == [True]
    assert diagnose(known).findings == ()


def test_servers_of_other_models_are_not_compared():
    texts = (vllm(60, 9, 0.5, model="a"), vllm(1, 0, 0.0, model="b"), vllm(50, 9, 0.5, model="a"))
    known, _ = told(*texts, origins=["x", "y", "z"])
    assert [each.name for each in known.workers] == ["x", "z"]


def test_what_one_server_lacks_is_not_taken_from_another():
    load_time = mean("lmcache:time_to_retrieve", 50, 3.0, "")
    known, _ = told(vllm(30, 0, 0.5), vllm(3, 0, 0.1) + load_time, origins=["x", "y"])
    assert known.top.number("load") is None
    # What is no engine runs beside one.
    known, _ = told(vllm(30, 0, 0.5), load_time, origins=["x", "y"])
    assert known.top.number("load") == 3.0


def test_a_cache_layer_that_nobody_asks_is_not_the_connector():
    text = 'lmcache:num_lookup_tokens_total{{worker_id="0"}} {}\n'
    assert told(vllm(1, 0, 0.1) + text.format(0))[0].connector == ""
    assert told(vllm(1, 0, 0.1) + text.format(500))[0].connector == "lmcache"


def test_hits_are_those_of_all_tiers():
    labels = 'engine="0"'
    text = "".join(
        f"vllm:{name}_total{{{labels}}} {value}\n"
        for name, value in (
            ("prefix_cache_queries", 1000),
            ("prefix_cache_hits", 0),
            ("external_prefix_cache_queries", 1000),
            ("external_prefix_cache_hits", 900),
        )
    )
    known, _ = told(text + vllm(3, 0, 0.2))
    assert known.top.numbers("num_hits", "num_queries") == (900, 1000)
    arms = '[[arms]]\nname = "off"\ncache = "off"\nttft_mean = "2 s"\n'
    report = load([Document(path="x.toml", text=arms), Document(path="m.prom", text=text + LIVE)])
    assert "dead_counter" not in [each.rule for each in diagnose(Known(report.facts)).findings]


def sglang(running, waiting, usage, **ranks):
    labels = ",".join(['model_name="m"', *(f'{key}="{value}"' for key, value in ranks.items())])
    return (
        f"sglang:num_running_reqs{{{labels}}} {running}\n"
        f"sglang:num_queue_reqs{{{labels}}} {waiting}\n"
        f"sglang:token_usage{{{labels}}} {usage}\n"
        f"sglang:max_total_num_tokens{{{labels}}} 80000\n"
        f"sglang:page_size{{{labels}}} 64\n"
        f"sglang:prompt_tokens_total{{{labels}}} 1000\n"
        f"sglang:cached_tokens_total{{{labels}}} 250\n"
        + mean("sglang:prefetch_bandwidth", 10, 1.5, labels)
    )


def test_data_parallel_ranks_of_sglang():
    text = "".join(
        sglang(running, 0, 0.2 + running / 100, tp_rank=2 * dp + part, dp_rank=dp)
        for dp, running in enumerate((4, 9, 5))
        for part in (0, 1)
    )
    known, _ = told(text)
    assert known.top.numbers("running", "kv_usage") == (9, pytest.approx(0.29))
    assert known.top.numbers("pool_tokens", "block_size") == (80_000, 64)  # of one of the three
    assert known.top.number("num_queries") == 3000  # each second TP rank says the same again
    assert [each.number("running") for each in known.workers] == [4, 9, 5]
    assert known.tiers[0].number("bandwidth") == pytest.approx(2 * 1.5e9)  # both ranks of one


def test_ranks_of_sglang_without_the_first():
    known, _ = told(sglang(7, 1, 0.5, tp_rank=4, pp_rank=1) + sglang(7, 1, 0.5, tp_rank=5))
    assert known.top.numbers("running", "waiting") == (7, 1)


def test_a_log_of_data_parallel_attention():
    line = (
        "[2026-03-01 10:00:0{n} DP{n} TP{tp} EP{tp}] Prefill batch, #new-seq: 1, #new-token: 300, "
        "#cached-token: 100, token usage: 0.2, #running-req: {n}, #queue-req: 0, x"
    )
    lines = [line.format(n=n, tp=tp) for n, tp in ((0, 0), (0, 1), (1, 2), (1, 3), (1, 2))]
    known, _ = told("\n".join(lines), name=".log")
    assert [each.name for each in known.workers] == ["dp 0", "dp 1"]
    assert known.top.number("num_hits") == 300


def stats(engine, running, rate, usage=50.0):
    return (
        f"INFO 10-07 02:50:27 [loggers.py:271] Engine {engine:03d}: Avg prompt throughput: 80.0 "
        f"tokens/s, Avg generation throughput: 50.0 tokens/s, Running: {running} reqs, Waiting: 0 "
        f"reqs, GPU KV cache usage: {usage}%, Prefix cache hit rate: {rate}%"
    )


def test_engines_that_idle_do_not_lower_the_hit_rate():
    lines = [stats(0, 10, 60.0), stats(1, 0, 0.0), stats(2, 0, 0.0)] * 3
    known, _ = told("\n".join(lines), name=".log")
    assert known.top.number("hit_rate") == pytest.approx(0.6)
    known, _ = told("\n".join([stats(0, 30, 60.0), stats(1, 10, 20.0)]), name=".log")
    assert known.top.number("hit_rate") == pytest.approx(0.5)


def test_a_hit_rate_falls_on_one_engine():
    # Alternating lines of two engines with other rates are no trend.
    lines = [stats(n % 2, 9, 90.0 if n % 2 else 10.0, 95.0) for n in range(30)]
    lines += [stats(0, 9, 10.0, 95.0)] * 30
    known, _ = told("\n".join(lines), name=".log")
    first, last = known.top.numbers("hit_rate_first", "hit_rate_last")
    assert first == pytest.approx(last)


OFF = '[[arms]]\nname = "without"\ncache = "off"\nttft_mean = "0.4 s"\n'
LIVE = vllm(9, 0, 0.4, ttft=2.0) + mean("vllm:request_prefill_time_seconds", 100, 1.7, 'engine="0"')


def with_arms(arms):
    report = load([Document(path="x.toml", text=arms), Document(path="m.prom", text=LIVE)])
    return Known(report.facts)


def test_what_a_server_measured_is_not_of_a_run_without_the_cache():
    known = with_arms(OFF)
    assert [(each.name, each.text("cache")) for each in known.arms] == [
        ("without", "off"),
        ("as measured", "on"),
    ]
    without, live = known.arms
    assert (without.number("prefill"), live.number("prefill")) == (None, 1.7)
    assert live.number("block_size") == without.number("block_size") == 16
    assert "stage_sum" not in [each.rule for each in diagnose(known).findings]


def test_what_a_server_measured_is_of_the_run_with_the_cache():
    known = with_arms(OFF + '[[arms]]\nname = "with"\ncache = "warm"\nttft_p50 = "1.9 s"\n')
    assert [each.name for each in known.arms] == ["without", "with"]
    assert known.arms[0].number("prefill") is None
    assert known.arms[1].numbers("prefill", "ttft_p50", "ttft_mean") == (1.7, 1.9, 2.0)


def test_an_arm_without_figures_is_what_the_server_measured():
    known = with_arms('[[arms]]\nname = "plain"\ncache = "off"\n')
    assert [each.number("ttft_mean") for each in known.arms] == [2.0]
