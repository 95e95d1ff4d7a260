"""Everything the doctor can be told, with its unit: the words that readers and rules share.

Keys are grouped by topic. What holds for all arms stands at the top of an observations file; an arm
may say it otherwise. docs/doctor-observations.md is written from these classes.
"""

from __future__ import annotations

import typing
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headstart.doctor.quantities import (
    BytesPerS,
    Count,
    Flag,
    Flops,
    Nbytes,
    PerS,
    Seconds,
    Share,
    Text,
    Tokens,
    TokensPerS,
    Unit,
)


class Strict(BaseModel):
    """Unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def told(description: str) -> Any:
    """A key that may be left out: nothing is assumed about what is not told."""
    return Field(default=None, description=description)


class Engine(Strict):
    """What runs."""

    engine: Text | None = told("vllm, sglang, tensorrt-llm, tgi, llama.cpp, or another name")
    engine_version: Text | None = told('such as "0.27.1"')
    connector: Text | None = told("cache layer beside the engine: lmcache, mooncake, headstart ...")
    connector_version: Text | None = told('such as "0.3.7"')


class Machine(Strict):
    """Model and machine."""

    model_params: Count | None = told("parameters that a token uses (of experts, the active ones)")
    weights: Nbytes | None = told("weights, all devices of one replica together")
    kv_bytes_per_token: Nbytes | None = told("KV cache of one token, all layers, all ranks")
    max_model_len: Tokens | None = told("longest prompt plus answer that is accepted")
    device_flops: Flops | None = told("FLOP/s of all devices of one replica, by their data sheet")
    device_memory: Nbytes | None = told("memory of all devices of one replica")
    link_bandwidth: BytesPerS | None = told("host to device, as measured or by data sheet")
    prefill_rate: TokensPerS | None = told("tokens a second of one prompt computed alone")
    numa_nodes: Count | None = told("NUMA nodes of the host")
    numa_bound: Flag | None = told("whether workers and their host memory are bound to one node")
    pinned: Flag | None = told("whether host memory of the cache is pinned (page-locked)")
    memory_limit: Nbytes | None = told("limit of the container (cgroup memory.max)")
    memory_used: Nbytes | None = told("of it used by processes, page cache left out")
    ranks: Count | None = told("ranks, or instances, that share one tier or one link")


class Load(Strict):
    """What was asked."""

    num_requests: Count | None = told("requests measured")
    duration: Seconds | None = told("length of the measured window")
    concurrency: Count | None = told("requests in flight at once")
    requests_per_s: PerS | None = told("requests sent a second")
    prompt_tokens: Tokens | None = told("mean length of a prompt")
    prompt_tokens_p50: Tokens | None = told("median length of a prompt")
    prompt_tokens_start: Tokens | None = told("mean length of a prompt at the start of the run")
    prompt_tokens_end: Tokens | None = told("mean length of a prompt at the end of the run")
    input_tokens_per_s: TokensPerS | None = told("prompt tokens a second, cached ones included")
    output_tokens: Tokens | None = told("mean length of an answer")
    shared_tokens: Tokens | None = told("tokens from the start that a prompt shares with earlier")
    shareable_share: Share | None = told("share of all prompt tokens that an endless cache hits")
    first_difference: Tokens | None = told("position of the first token that differs by request")
    template_tokens: Tokens | None = told("length of the text that was meant to be shared")
    share_over_block: Share | None = told("share of prompts at least one block long")
    sessions: Count | None = told("sessions, documents or tenants in use at the same time")
    session_tokens: Tokens | None = told("tokens that each of them keeps using")
    access: Literal["cyclic", "random", "recent"] | None = told(
        "order in which they come: all in turn, at random, mostly the last ones"
    )
    reuse_distance: Tokens | None = told("other tokens asked between two uses of a prefix")
    distinct_prefixes: Count | None = told("different prefixes that are used in turn")
    is_repeat: Flag | None = told("whether exactly the same prompts were asked before")


class Times(Strict):
    """First token and throughput."""

    ttft_mean: Seconds | None = told("time to the first token, mean")
    ttft_p50: Seconds | None = told("median")
    ttft_p90: Seconds | None = told("90th percentile")
    ttft_p95: Seconds | None = told("95th percentile")
    ttft_p99: Seconds | None = told("99th percentile")
    ttft_server: Seconds | None = told("median by the server's own clock")
    ttft_first: Seconds | None = told("of the first requests after a start")
    ttft_short: Seconds | None = told("of short prompts, in the mix (p50, or p99 for both)")
    ttft_short_alone: Seconds | None = told("of short prompts when nothing else runs")
    ttft_spread: Share | None = told("how far equal runs differ: (largest - smallest) / median")
    includes_startup: Flag | None = told("whether loading the model is part of the TTFT")
    tpot: Seconds | None = told("time for each later token, mean")
    throughput: TokensPerS | None = told("output tokens a second")
    request_throughput: PerS | None = told("requests answered a second")


class Stages(Strict):
    """Where a first token's time goes (of one request; medians, or means beside `ttft_mean`)."""

    queue: Seconds | None = told("waiting before it runs, by the engine's clock")
    queue_load: Seconds | None = told("of that, waiting for its load; vLLM counts it as queue")
    hash: Seconds | None = told("making keys: hashing tokens, images, text")
    lookup: Seconds | None = told("asking what is held, all tiers and round trips")
    lookup_p99: Seconds | None = told("99th percentile of that")
    embed: Seconds | None = told("embedding for a semantic cache")
    ann: Seconds | None = told("nearest-neighbour search of a semantic cache")
    load: Seconds | None = told("bringing held KV to the device; with transfer etc. their sum")
    load_p50_alone: Seconds | None = told("the same when nothing else is loaded")
    load_p99: Seconds | None = told("99th percentile of load")
    prepare: Seconds | None = told("CPU work for a transfer: descriptors, planning, submitting")
    serialize: Seconds | None = told("(de)serialising or (de)compressing KV")
    transfer: Seconds | None = told("moving the bytes, without the two above")
    prefill: Seconds | None = told("computing what is not loaded, to the first token")
    ready_gap: Seconds | None = told("from all data being there to being run")
    lock_wait: Seconds | None = told("of these, waiting for locks")


class Hits(Strict):
    """What was hit."""

    hit_rate: Share | None = told("share of the prompt tokens that were not computed, all tiers")
    hit_rate_first: Share | None = told("the same at the start of the run")
    hit_rate_last: Share | None = told("the same at the end of the run")
    local_hit_rate: Share | None = told("of that, by the engine's own device cache")
    external_hit_rate: Share | None = told("what the lower tiers hit of what the device did not")
    cached_tokens: Tokens | None = told("tokens hit a request")
    load_tokens: Tokens | None = told('tokens that had to be loaded a request ("need to load")')
    found_tokens: Tokens | None = told("tokens that the tiers said they hold, a request")
    num_queries: Count | None = told("queries (or tokens asked) in the period, by counter delta")
    num_hits: Count | None = told("hits (or tokens hit) in the period, by counter delta")
    num_hits_before: Count | None = told("hits in an earlier period of the same length")
    probe_cached_tokens: Tokens | None = told("cached tokens when one prompt is sent a second time")
    missed_after_eviction: Share | None = told("share of the tokens missed that were held before")
    same_key: Flag | None = told("whether the same tokens get the same key in every process")


class Cache(Strict):
    """How the engine's cache is set up."""

    block_size: Tokens | None = told("tokens of a block (page, chunk)")
    group_block_sizes: tuple[Tokens, ...] | None = told("block size of each KV group (hybrids)")
    pool_tokens: Tokens | None = told("tokens that fit the device cache, or the cache in question")
    host_pool_tokens: Tokens | None = told("tokens that fit the host pool, beside pool_tokens")
    num_slots: Count | None = told("prefixes that can be held, where the cache has slots")
    max_num_seqs: Count | None = told("requests that may run at once")
    speculation: Flag | None = told("speculative decoding (MTP, EAGLE, draft model)")
    weights_offloaded: Nbytes | None = told("weights kept in host memory by a flag")
    admission_margin: Share | None = told("share of the KV that admission keeps free for growth")
    routing: Text | None = told("how requests are given to workers, or ordered: a name")
    background: Text | None = told("what else differs between arms, in a word")
    serde: Text | None = told("serialiser or codec of KV: naive, safetensors, pickle, cachegen ...")
    is_lossy: Flag | None = told("whether that changes values")
    codec_ratio: Share | None = told("compressed size by plain size")


class Room(Strict):
    """Room."""

    kv_usage: Share | None = told("device KV cache in use, at its fullest")
    running: Count | None = told("requests running")
    waiting: Count | None = told("requests waiting")
    num_preemptions: Count | None = told("preemptions or retractions in the period")
    recomputed_share: Share | None = told("share of computed tokens that were computed again")
    num_alloc_failures: Count | None = told("blocked or failed allocations in the period")
    pool: Nbytes | None = told("host pool through which loads pass")
    fetch: Nbytes | None = told("size of one piece that is fetched into it")
    num_rejects: Count | None = told("loads refused, or given up at their deadline")
    deadline: Seconds | None = told("after which a load is given up")
    free_tokens: Tokens | None = told("free device KV while requests wait")
    smallest_waiting: Tokens | None = told("prompt of the smallest waiting request")
    largest_waiting: Tokens | None = told("prompt of the largest waiting request")
    steps_without_admission: Count | None = told("engine steps in a row that admitted nothing")


class Cpu(Strict):
    """CPU, locks, monitors."""

    step: Seconds | None = told("one step of the engine")
    step_cpu: Seconds | None = told("of it, bookkeeping of the cache on the scheduler's thread")
    evict: Seconds | None = told("evicting one block")
    evictions_per_request: Count | None = told("blocks evicted for one request")
    keys_per_lookup: Count | None = told("keys asked in one look-up")
    lookups_per_s: PerS | None = told("look-ups a second on one thread; default: requests_per_s")
    round_trips: Count | None = told("round trips one after the other for one request")
    round_trip: Seconds | None = told("time of one of them")
    scheduler_cpu: Share | None = told("CPU of the scheduler's thread, of one core")
    engine_busy: Share | None = told("share of the time in which the engine computes")
    sleep_share: Share | None = told("share of the wall time that idle loops sleep")
    heartbeat_gap: Seconds | None = told("longest time in which the scheduler's thread did not run")
    drain: Seconds | None = told("time until a backlog of transfers was gone")
    drain_alone: Seconds | None = told("the same with the suspect thread quiet, or by device speed")
    stages_together: Count | None = told("by how much all stages grew at once, CPU only ones too")
    memory_busy: Share | None = told("device memory bandwidth in use (DRAM active, dmon mem)")
    link_busy: Share | None = told("host link bandwidth in use (PCIe rx by its limit)")
    loads_in_flight: Count | None = told("loads at the same time")
    load_nbytes: Nbytes | None = told("bytes loaded a request")


class Answers(Strict):
    """Are the answers right."""

    differing_share: Share | None = told("greedy answers that differ between hit and miss")
    noise_differing_share: Share | None = told("the same between two misses")
    garbled_share: Share | None = told("answers that are garbage, on hits")
    garbled_share_miss: Share | None = told("the same on misses")
    score: Share | None = told("quality score")


class Semantic(Strict):
    """Semantic cache."""

    semantic_hit_rate: Share | None = told("share of the requests answered by it")
    semantic_miss: Seconds | None = told("an answer by the model, without the semantic cache")
    semantic_precision: Share | None = told("share of its answers that fit the question")
    semantic_target: Share | None = told("precision that is wanted")
    threshold: Share | None = told("similarity from which it answers")
    opposite_similarity: Share | None = told("similarity of questions with different answers")
    paraphrase_similarity: Share | None = told("similarity of questions with the same answer")
    embeds_per_request: Count | None = told("embeddings made a request")
    embedder_load: Seconds | None = told("of embed, loading or building the embedder each time")
    embed_alone: Seconds | None = told("embed when only one request runs")
    entries: Count | None = told("entries of the index")
    index: Literal["flat", "tree", "graph"] | None = told("flat scans all, graph is HNSW")


class Situation(Machine, Load, Times, Stages, Hits, Cache, Room, Cpu, Answers, Semantic):
    """All that can be said of one arm."""


TOPICS: tuple[type[Strict], ...] = (
    Engine, Machine, Load, Times, Stages, Hits, Cache, Room, Cpu, Answers, Semantic
)  # fmt: skip


class Arm(Situation):
    """One way in which the same load was run."""

    name: Text
    cache: Literal["off", "cold", "warm", "on"] = Field(
        description="off: no cache, or without the tier in question; cold: on, but nothing held; "
        "warm: on, and what is asked is held; on: as traffic comes"
    )


class Tier(Strict):
    """A medium that holds KV below the device, as seen by loads."""

    name: Text
    kind: Literal["memory", "file", "network"] | None = told("host memory, disk, remote")
    bandwidth: BytesPerS | None = told("that loads get")
    device_bandwidth: BytesPerS | None = told("that the medium gives at best")
    depth1_bandwidth: BytesPerS | None = told("that it gives to one request at a time")
    latency: Seconds | None = told("of one request to the medium")
    submit_interval: Seconds | None = told("between two requests to it")
    workers: Count | None = told("threads or requests in flight that read")
    busy_cores: Count | None = told("CPU cores kept busy while reading or writing")
    call: Nbytes | None = told("bytes of one copy or I/O call")
    call_time: Seconds | None = told("time of one such call")
    capacity: Nbytes | None = told("limit that was set")
    used: Nbytes | None = told("bytes on the medium (du)")
    reported_used: Nbytes | None = told("bytes in use, as the cache says")
    read: Nbytes | None = told("bytes read in the period, by the cache")
    written: Nbytes | None = told("bytes written in the period")
    rewritten: Nbytes | None = told("of them, bytes that were there already")
    device_read: Nbytes | None = told("bytes that the device gave in the same period (iostat)")
    moved: Nbytes | None = told("bytes moved for one load")
    needed: Nbytes | None = told("bytes that the load needed")
    found: Tokens | None = told("tokens it said it holds for a request")
    delivered: Tokens | None = told("tokens that came")
    num_found: Count | None = told("blocks it said it holds")
    num_failed_reads: Count | None = told("of them, reads that failed or came back empty")
    num_timeouts: Count | None = told("loads that timed out; weighed by num_requests and deadline")
    restarted: Flag | None = told("whether its process was restarted before")
    hot: Nbytes | None = told("bytes that are read again and again")
    room: Tokens | None = told("tokens that fit the buffer its reads pass through")


class Worker(Strict):
    """One engine behind a router."""

    name: Text
    running: Count | None = told("requests running")
    waiting: Count | None = told("requests waiting")
    hit_rate: Share | None = told("its own hit rate")
    num_preemptions: Count | None = told("its own preemptions")


class Read(Strict):
    """A point of a sweep of transfers."""

    name: Text = Field(default="", description="what was swept")
    call: Nbytes | None = told("bytes of one call")
    depth: Count | None = told("calls in flight at once")
    bandwidth: BytesPerS | None = told("that was reached")


class LogRate(Strict):
    """A line of a log that prints a rate."""

    name: Text = Field(default="", description="what the line says it is")
    size: Nbytes | None = told("bytes in the line")
    time: Seconds | None = told("time in the line")
    printed: BytesPerS | None = told("rate in the line")
    other: BytesPerS | None = told("the same thing by another tool")


class Observations(Engine, Situation):
    """A whole file."""

    arms: tuple[Arm, ...] = Field(default=(), description="`[[arms]]`")
    tiers: tuple[Tier, ...] = Field(default=(), description="`[[tiers]]`")
    workers: tuple[Worker, ...] = Field(default=(), description="`[[workers]]`")
    reads: tuple[Read, ...] = Field(default=(), description="`[[reads]]`")
    log_rates: tuple[LogRate, ...] = Field(default=(), description="`[[log_rates]]`")


LISTS: dict[str, type[Strict]] = {
    "arms": Arm, "tiers": Tier, "workers": Worker, "reads": Read, "log_rates": LogRate
}  # fmt: skip
TOP = "top"
"""The scope of what holds for all arms."""


def unit_of(model: type[BaseModel], key: str) -> Unit | None:
    """The unit of a key of a model; None: one of a few words."""
    return _UNITS.get((model, key))


def _find_units() -> dict[tuple[type[BaseModel], str], Unit]:
    found: dict[tuple[type[BaseModel], str], Unit] = {}
    models: tuple[type[Strict], ...] = (Observations, *TOPICS, *LISTS.values())
    for model in models:
        hints = typing.get_type_hints(model, include_extras=True)
        for key in model.model_fields:
            unit = _unit_in(hints[key])
            if unit is not None:
                found[model, key] = unit
    return found


def _unit_in(hint: object) -> Unit | None:
    for each in getattr(hint, "__metadata__", ()):
        if isinstance(each, Unit):
            return each
    units = (_unit_in(part) for part in typing.get_args(hint))
    return next((unit for unit in units if unit is not None), None)


_UNITS = _find_units()
