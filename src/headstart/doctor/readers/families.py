"""What the metrics of each program mean: names of its counters and gauges to the doctor's keys.

Times are means, so that stages and the whole add up. Hit rates are in tokens. Names changed over
the versions; of several for one thing the newest that is exposed counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headstart.doctor.facts import Fact, Source, Value
from headstart.doctor.readers.exposition import Metrics
from headstart.doctor.vocabulary import TOP

_QUANTILES = {"ttft_p90": 0.9, "ttft_p99": 0.99}
"""Without the median: stages are means, and would not add up to it."""
_LEAST = {"ttft_p90": 30, "ttft_p99": 300}
"""Requests from which a quantile says something."""
_TAIL = 100


@dataclass(frozen=True, slots=True)
class _Teller:
    """Makes facts of metrics, cited where the metric stands."""

    metrics: Metrics

    def first(self, *names: str) -> str:
        """The first of several names that is exposed; the last if none is."""
        return next((name for name in names if name in self.metrics), names[-1])

    def one(
        self, key: str, value: Value | None, name: str, scope: str = TOP, owner: str = ""
    ) -> Iterator[Fact]:
        """A fact, if there is a value; `name` is the metric to cite."""
        if value is not None:
            source = self.metrics.source(name)
            yield Fact(key=key, value=value, source=source, scope=scope, owner=owner)

    def mean(self, key: str, *names: str, factor: float = 1.0, **labels: str) -> Iterator[Fact]:
        """The mean of a histogram."""
        for name in names:
            value = self.metrics.mean(name, **labels)
            if value is not None:
                yield from self.one(key, value * factor, f"{name}_sum")
                return

    def growth(self, key: str, *names: str) -> Iterator[Fact]:
        """What a counter grew by."""
        name = self.first(*names)
        yield from self.one(key, self.metrics.growth(name), name)

    def now(self, key: str, name: str, **labels: str) -> Iterator[Fact]:
        """The last value of a gauge."""
        yield from self.one(key, self.metrics.now(name, **labels), name)

    def largest(self, key: str, *names: str, **labels: str) -> Iterator[Fact]:
        """The largest value of a gauge of an engine; of any, where it is told of none alone."""
        name, metrics = self.first(*names), self.metrics
        value = metrics.largest(name, **labels)
        yield from self.one(key, metrics.largest(name) if value is None else value, name)

    def share(self, key: str, part: str, whole: str) -> Iterator[Fact]:
        """A counter by another one."""
        asked, hit = self.metrics.growth(whole), self.metrics.growth(part)
        if asked and hit is not None:
            yield from self.one(key, min(1.0, hit / asked), part)

    def first_token(self, name: str) -> Iterator[Fact]:
        """Mean, quantiles and number of a histogram of first tokens."""
        yield from self.mean("ttft_mean", name)
        count = self.metrics.growth(f"{name}_count")
        if not count:
            return
        yield from self.one("num_requests", count, f"{name}_count")
        for key, share in _QUANTILES.items():
            if count >= _LEAST[key]:
                yield from self.one(key, self.metrics.quantile(name, share), f"{name}_count")

    def tier(
        self, owner: str, kind: str = "", **figures: tuple[float | None, str]
    ) -> Iterator[Fact]:
        """A tier, if anything is told of it: keys with (value, name of the metric to cite)."""
        told = {key: (value, name) for key, (value, name) in figures.items() if value is not None}
        if not told:
            return
        last = next(reversed(told.values()))[1]
        yield from self.one("name", owner, last, "tiers", owner)
        if kind:
            yield from self.one("kind", kind, last, "tiers", owner)
        for key, (value, name) in told.items():
            yield from self.one(key, value, name, "tiers", owner)


def facts(metrics: Metrics) -> Iterator[Fact]:
    """Of all programs that are in the metrics."""
    teller = _Teller(metrics)
    yield from _vllm(teller)
    yield from _sglang(teller)
    yield from _lmcache(teller)
    yield from _headstart(teller)


RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")


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
    name = "vllm:num_requests_waiting_by_reason"
    return metrics.now(name, reason="deferred", **labels) or 0.0


def _vllm(tell: _Teller) -> Iterator[Fact]:
    metrics, v = tell.metrics, "vllm:"
    if v + "time_to_first_token_seconds_sum" in metrics or v + "num_requests_running" in metrics:
        name = tell.first(v + "time_to_first_token_seconds_sum", v + "num_requests_running")
        yield from tell.one("engine", "vllm", name)
    yield from tell.first_token(v + "time_to_first_token_seconds")
    yield from tell.mean("queue", v + "request_queue_time_seconds")
    yield from tell.mean("prefill", v + "request_prefill_time_seconds")
    yield from tell.mean(
        "tpot", v + "request_time_per_output_token_seconds", v + "time_per_output_token_seconds"
    )
    yield from tell.mean("prompt_tokens", v + "request_prompt_tokens")
    yield from tell.mean("output_tokens", v + "request_generation_tokens")
    yield from tell.growth("num_preemptions", v + "num_preemptions")
    # Queue and room are of one engine: what waits for one is not helped by another's room.
    fullest = metrics.fullest(v + "num_requests_waiting", v + "num_requests_running")
    yield from tell.now("running", v + "num_requests_running", **fullest)
    waiting = metrics.now(v + "num_requests_waiting", **fullest)
    if waiting is not None:
        waiting = max(0.0, waiting - _deferred(metrics, **fullest))
    yield from tell.one("waiting", waiting, v + "num_requests_waiting")
    yield from tell.largest(
        "kv_usage", v + "kv_cache_usage_perc", v + "gpu_cache_usage_perc", **fullest
    )
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


def _vllm_hits(tell: _Teller) -> Iterator[Fact]:
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


def _vllm_offload(tell: _Teller) -> Iterator[Fact]:
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


def _sglang(tell: _Teller) -> Iterator[Fact]:
    metrics, s = tell.metrics, "sglang:"
    if s + "num_running_reqs" in metrics:
        yield from tell.one("engine", "sglang", s + "num_running_reqs")
    yield from tell.first_token(s + "time_to_first_token_seconds")
    yield from tell.mean("queue", s + "queue_time_seconds")
    stage = s + "per_stage_req_latency_seconds"
    yield from tell.mean("prefill", stage, stage="prefill_forward")
    yield from tell.mean(
        "tpot", s + "request_time_per_output_token_seconds", s + "time_per_output_token_seconds"
    )
    yield from tell.mean("prompt_tokens", s + "prompt_tokens_histogram")
    yield from tell.growth("num_preemptions", s + "num_retracted_requests")
    fullest = metrics.fullest(s + "num_queue_reqs", s + "num_running_reqs")
    yield from tell.now("running", s + "num_running_reqs", **fullest)
    yield from tell.now("waiting", s + "num_queue_reqs", **fullest)
    for key, names in (
        ("kv_usage", ("full_token_usage", "token_usage")),
        ("pool_tokens", ("max_total_num_tokens",)),
        ("block_size", ("page_size",)),
        ("host_pool_tokens", ("hicache_host_total_tokens",)),
    ):
        yield from tell.largest(key, *(s + name for name in names), **fullest)
    yield from tell.mean("load", s + "load_back_duration_seconds")
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


def _sglang_hits(tell: _Teller) -> Iterator[Fact]:
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


def _lmcache(tell: _Teller) -> Iterator[Fact]:
    metrics, c = tell.metrics, "lmcache:"
    asked = tell.first(c + "num_lookup_tokens", "lmcache_mp:lookup_requested_tokens")
    hit = tell.first(c + "num_lookup_hits", "lmcache_mp:lookup_hit_tokens")
    if metrics.growth(asked):
        yield from tell.one("connector", "lmcache", asked)
    requests, found = metrics.growth(c + "num_lookup_requests"), metrics.growth(hit)
    if requests and found is not None:
        yield from tell.one("found_tokens", found / requests, hit)
    yield from tell.mean("lookup", c + "time_to_lookup")
    yield from tell.mean("load", c + "time_to_retrieve")
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


def _headstart(tell: _Teller) -> Iterator[Fact]:
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
        yield from tell.one("load", (copied + (waited or 0.0)) / hits, h + "load_copy_seconds")
        nbytes = metrics.growth(h + "load_bytes")
        if nbytes is not None:
            yield from tell.one("load_nbytes", nbytes / hits, h + "load_bytes")
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


def _tail(tell: _Teller, key: str, name: str) -> Iterator[Fact]:
    if (tell.metrics.growth(f"{name}_count") or 0) >= _TAIL:
        yield from tell.one(key, tell.metrics.quantile(name, 0.99), f"{name}_count")
