"""What the metrics of each program mean: names of its counters and gauges to the doctor's keys.

Times are means over all requests, so that stages and the whole add up. Hit rates are in tokens.
Names changed over the versions; of several for one thing the newest that is exposed counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.facts import Fact, Source
from headstart.doctor.readers.exposition import Metrics
from headstart.doctor.readers.teller import Teller

_TAIL = 100
_TTFT = "time_to_first_token_seconds"


def facts(metrics: Metrics) -> Iterator[Fact]:
    """Of all programs that are in the metrics."""
    teller = Teller(metrics)
    yield from _vllm(teller)
    yield from _sglang(teller)
    yield from _lmcache(teller)
    yield from _headstart(teller)


RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_DEFERRED = "vllm:num_requests_waiting_by_reason"
_AWAITED = "headstart:wait_seconds"
_PUT_OFF = "vllm:kv_offload_lookup_async_delay_seconds_sum"
_SOME = 4.0
"""Requests from which what they wait for says something of all."""


def load_of(metrics: Metrics, **labels: str) -> dict[str, tuple[float, Source]]:
    """Requests running and waiting, hit rate and preemptions: of one engine, or all."""
    found: dict[str, tuple[float, Source]] = {}
    for key, names in (
        ("running", RUNNING),
        ("waiting", _WAITING),
    ):
        for name in names:
            value = metrics.now(name, **labels)
            if value is not None:
                deferred = _deferred(metrics, **labels) if key == "waiting" else 0.0
                found[key] = (max(0.0, value - deferred), metrics.source(name))
    name = "vllm:num_preemptions"
    preempted = metrics.growth(name, **labels)
    if preempted is not None:
        found["num_preemptions"] = (preempted, metrics.source(name))
    name = "vllm:prefix_cache_hits"
    hit = metrics.growth(name, **labels)
    asked = metrics.growth("vllm:prefix_cache_queries", **labels)
    if hit is not None and asked:
        found["hit_rate"] = (min(1.0, hit / asked), metrics.source(name))
    return found


def _deferred(metrics: Metrics, **labels: str) -> float:
    """vLLM's requests that wait for a load and not for room; they are among those waiting."""
    return metrics.now(_DEFERRED, reason="deferred", **labels) or 0.0


def _vllm(tell: Teller) -> Iterator[Fact]:
    metrics, v = tell.metrics, "vllm:"
    if f"{v}{_TTFT}_sum" in metrics or v + "num_requests_running" in metrics:
        name = tell.first(f"{v}{_TTFT}_sum", v + "num_requests_running")
        yield from tell.one("engine", "vllm", name)
    yield from tell.first_token(v + _TTFT)
    yield from tell.mean("prefill", v + "request_prefill_time_seconds")
    yield from tell.mean(
        "tpot", v + "request_time_per_output_token_seconds", v + "time_per_output_token_seconds"
    )
    yield from tell.mean("prompt_tokens", v + "request_prompt_tokens")
    yield from tell.mean("output_tokens", v + "request_generation_tokens")
    yield from tell.growth("num_preemptions", v + "num_preemptions")
    # Queue and room are of one engine: what waits for one is not helped by another's room. An idle
    # one has room whatever it lacked before.
    gauges = v + "num_requests_waiting", v + "num_requests_running"
    fullest = metrics.fullest(*gauges)
    yield from tell.now("running", v + "num_requests_running", **fullest)
    waiting = metrics.now(v + "num_requests_waiting", **fullest)
    if waiting is not None:
        waiting = max(0.0, waiting - _deferred(metrics, **fullest))
    yield from tell.one("waiting", waiting, v + "num_requests_waiting")
    usage = v + "kv_cache_usage_perc", v + "gpu_cache_usage_perc"
    yield from tell.largest("kv_usage", *usage, busy=gauges, **fullest)
    yield from _vllm_queue(tell)
    yield from _vllm_hits(tell)
    config = v + "cache_config_info"
    labels = metrics.labels(config, **fullest) or metrics.labels(config)
    size, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
    if size.isdigit():
        yield from tell.one("block_size", float(size), config)
        if blocks.isdigit():
            pool = float(size) * float(blocks)
            yield from tell.one("pool_tokens", pool, config)
    yield from _vllm_offload(tell)


def _vllm_queue(tell: Teller) -> Iterator[Fact]:
    """The queue, and what of it is waiting for loads.

    A request is scheduled, which ends its queue time, when it first runs: after its asynchronous
    load, and after all answers of a connector that it does not know yet (vLLM's
    `get_num_new_matched_tokens`). Headstart counts those waits. Of others at least the look-ups
    that vLLM's own offloading put off are told, and how many of those that wait now do so for
    either reason: their share of the time, by Little's law, from four that wait on.
    """
    metrics, queue = tell.metrics, "vllm:request_queue_time_seconds"
    yield from tell.mean("queue", queue)
    requests, seconds = metrics.growth(f"{queue}_count"), metrics.mean(queue)
    if not requests or not seconds:
        return
    waited = metrics.growth(_AWAITED)
    if waited is not None:
        yield from tell.one("queue_load", min(seconds, waited / requests), _AWAITED)
        return
    waiting, deferred = metrics.now(_WAITING[0]) or 0.0, _deferred(metrics)
    told = [((metrics.growth(_PUT_OFF) or 0.0) / requests, _PUT_OFF)]
    if waiting >= _SOME:
        told.append((seconds * deferred / waiting, _DEFERRED))
    longest, name = max(told)
    if longest:
        yield from tell.one("queue_load", min(seconds, longest), name)


def _vllm_hits(tell: Teller) -> Iterator[Fact]:
    """The external ones are of what the device did not hit."""
    metrics = tell.metrics
    asked = tell.first("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries")
    hit = tell.first("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits")
    yield from tell.share("local_hit_rate", hit, asked)
    outside, beyond = "vllm:external_prefix_cache_hits", "vllm:external_prefix_cache_queries"
    yield from tell.share("external_hit_rate", outside, beyond)
    queries, hits = metrics.growth(asked), metrics.growth(hit)
    if queries and hits is not None:
        total = hits + (metrics.growth(outside) or 0.0)
        yield from tell.one("num_queries", queries, asked)
        yield from tell.one("num_hits", total, hit)
        yield from tell.one("hit_rate", min(1.0, total / queries), hit)


def _vllm_offload(tell: Teller) -> Iterator[Fact]:
    metrics, o = tell.metrics, "vllm:kv_offload_"
    yield from tell.mean("lookup", o + "lookup_sync_delay_seconds")
    yield from tell.growth("num_alloc_failures", o + "allocation_failure")
    read, seconds, written = (
        metrics.growth(o + each) for each in ("load_bytes", "load_time", "store_bytes")
    )
    yield from tell.tier(
        "host memory",
        "memory",
        read=(read, o + "load_bytes"),
        written=(written, o + "store_bytes"),
        bandwidth=(read / seconds if read and seconds else None, o + "load_bytes"),
    )
    for tier in metrics.values_of(o + "tiering_read_bytes", "tier"):
        name = o + "tiering_read_bytes"
        read, seconds, written = (
            metrics.growth(o + "tiering_" + each, tier=tier)
            for each in ("read_bytes", "read_time", "write_bytes")
        )
        yield from tell.tier(
            tier,
            "memory" if "primary" in tier else "",
            read=(read, name),
            written=(written, o + "tiering_write_bytes"),
            bandwidth=(read / seconds if read and seconds else None, name),
        )


def _sglang(tell: Teller) -> Iterator[Fact]:
    metrics, s = tell.metrics, "sglang:"
    if s + "num_running_reqs" in metrics:
        yield from tell.one("engine", "sglang", s + "num_running_reqs")
    yield from tell.first_token(s + _TTFT)
    yield from tell.mean("queue", s + "queue_time_seconds")
    stage = s + "per_stage_req_latency_seconds"
    yield from tell.mean("prefill", stage, stage="prefill_forward")
    yield from tell.mean(
        "tpot", s + "request_time_per_output_token_seconds", s + "time_per_output_token_seconds"
    )
    yield from tell.mean("prompt_tokens", s + "prompt_tokens_histogram")
    yield from tell.growth("num_preemptions", s + "num_retracted_requests")
    gauges = s + "num_queue_reqs", s + "num_running_reqs"
    fullest = metrics.fullest(*gauges)
    yield from tell.now("running", s + "num_running_reqs", **fullest)
    yield from tell.now("waiting", s + "num_queue_reqs", **fullest)
    usage = s + "full_token_usage", s + "token_usage"
    yield from tell.largest("kv_usage", *usage, busy=gauges, **fullest)
    for key, names in (
        ("pool_tokens", ("max_total_num_tokens",)),
        ("block_size", ("page_size",)),
        ("host_pool_tokens", ("hicache_host_total_tokens",)),
    ):
        yield from tell.largest(key, *(s + name for name in names), **fullest)
    yield from tell.per_request("load", s + "load_back_duration_seconds", s + _TTFT)
    yield from _sglang_hits(tell)
    yield from tell.tier(
        "hicache host",
        "memory",
        read=(metrics.growth(s + "load_back_bytes"), s + "load_back_bytes"),
        written=(metrics.growth(s + "hicache_backup_bytes"), s + "hicache_backup_bytes"),
    )
    bandwidth = metrics.mean_of_all_ranks(s + "prefetch_bandwidth")
    yield from tell.tier(
        "hicache storage",
        bandwidth=(bandwidth * 1e9 if bandwidth else None, s + "prefetch_bandwidth_sum"),
    )


def _sglang_hits(tell: Teller) -> Iterator[Fact]:
    """From tokens by where they came from, else from cached and all prompt tokens."""
    metrics, name = tell.metrics, "sglang:prefill_effective_tokens"
    parts = {mode: metrics.growth(name, mode=mode) for mode in metrics.values_of(name, "mode")}
    tokens = {mode: value or 0.0 for mode, value in parts.items()}
    total = sum(tokens.values())
    if total:
        device, computed = tokens.get("device_hit", 0.0), tokens.get("input", 0.0)
        yield from tell.one("num_queries", total, name)
        yield from tell.one("num_hits", total - computed, name)
        yield from tell.one("local_hit_rate", device / total, name)
        yield from tell.one("hit_rate", 1.0 - computed / total, name)
        if total > device:
            lower = total - device - computed
            yield from tell.one("external_hit_rate", lower / (total - device), name)
        return
    name, asked = "sglang:cached_tokens", metrics.growth("sglang:prompt_tokens")
    told = "total" in metrics.values_of(name, "cache_source")
    hit = metrics.growth(name, cache_source="total") if told else metrics.growth(name)
    if asked and hit is not None:
        yield from tell.one("num_queries", asked, "sglang:prompt_tokens")
        yield from tell.one("num_hits", hit, name)
        yield from tell.one("hit_rate", min(1.0, hit / asked), name)


def _lmcache(tell: Teller) -> Iterator[Fact]:
    metrics, c = tell.metrics, "lmcache:"
    asked = tell.first(c + "num_lookup_tokens", "lmcache_mp:lookup_requested_tokens")
    hit = tell.first(c + "num_lookup_hits", "lmcache_mp:lookup_hit_tokens")
    if metrics.growth(asked):
        yield from tell.one("connector", "lmcache", asked)
    requests, found = metrics.growth(c + "num_lookup_requests"), metrics.growth(hit)
    if requests and found is not None:
        yield from tell.one("found_tokens", found / requests, hit)
    yield from tell.mean("lookup", c + "time_to_lookup")
    yield from tell.per_request("load", c + "time_to_retrieve", f"vllm:{_TTFT}")
    yield from _tail(tell, "lookup_p99", c + "time_to_lookup")
    yield from _tail(tell, "load_p99", c + "time_to_retrieve")
    read, written, get = (
        c + each
        for each in ("num_remote_read_bytes", "num_remote_write_bytes", "remote_time_to_get")
    )
    latency = metrics.mean(get)  # in ms
    yield from tell.tier(
        "lmcache remote",
        "network",
        read=(metrics.growth(read), read),
        written=(metrics.growth(written), written),
        latency=(latency * 1e-3 if latency is not None else None, f"{get}_sum"),
    )
    for owner, kind, names in (
        ("lmcache memory", "memory", (c + "local_cache_usage", "lmcache_mp:l1_memory_usage_bytes")),
        ("lmcache disk", "file", (c + "local_storage_usage",)),
    ):
        name = tell.first(*names)
        yield from tell.tier(owner, kind, reported_used=(metrics.now(name), name))


def _headstart(tell: Teller) -> Iterator[Fact]:
    """Of a node (`headstart_...`), and of its connector inside vLLM (`headstart:...`)."""
    metrics, h = tell.metrics, "headstart:"
    name = tell.first(h + "lookup_seconds_sum", h + "lookups")
    if name in metrics:
        yield from tell.one("connector", "headstart", name)
    yield from tell.mean("lookup", h + "lookup_seconds")
    yield from _tail(tell, "lookup_p99", h + "lookup_seconds")
    hits = metrics.growth(h + "hits")
    copied, waited = metrics.growth(h + "load_copy_seconds"), metrics.growth(h + "wait_seconds")
    if hits and copied is not None:
        looked_up = metrics.growth(h + "lookups") or 0.0
        requests = metrics.growth(f"vllm:{_TTFT}_count") or max(looked_up, hits)
        yield from tell.one("load", (copied + (waited or 0.0)) / requests, h + "load_copy_seconds")
        nbytes = metrics.growth(h + "load_bytes")
        if nbytes is not None:
            yield from tell.one("load_nbytes", nbytes / requests, h + "load_bytes")
    else:
        yield from tell.mean("load", h + "load_seconds")
    yield from _tail(tell, "load_p99", h + "load_seconds")
    for tier in metrics.values_of(h + "tier_hits", "tier"):
        told = {
            key: (metrics.growth(h + name, tier=tier), h + name)
            for key, name in (("read", "tier_read_bytes"), ("written", "tier_written_bytes"))
        }
        told |= {
            key: (metrics.now(h + name, tier=tier), h + name)
            for key, name in (
                ("reported_used", "tier_used_bytes"),
                ("capacity", "tier_capacity_bytes"),
                ("bandwidth", "device_bytes_per_second"),
            )
        }
        yield from tell.tier(tier, "memory" if tier == "memory" else "", **told)


def _tail(tell: Teller, key: str, name: str) -> Iterator[Fact]:
    if (tell.metrics.growth(f"{name}_count") or 0) >= _TAIL:
        yield from tell.one(key, tell.metrics.quantile(name, 0.99), f"{name}_count")
