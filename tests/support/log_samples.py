"""Lines of engines' logs in the forms in which they come, and what is made of them by chance."""

from __future__ import annotations

import re

from hypothesis import strategies as st


def v1(running, waiting, usage, local, external=None, *, engine=0, generation=500.0, more=""):
    outside = "" if external is None else f", External prefix cache hit rate: {external}%"
    return (
        f"(APIServer pid=71) INFO 10-07 02:50:27 [loggers.py:271] Engine {engine:03d}: "
        f"Avg prompt throughput: 812.4 tokens/s, Avg generation throughput: {generation} tokens/s, "
        f"Running: {running} reqs, Waiting: {waiting} reqs{more}, GPU KV cache usage: {usage}%, "
        f"Prefix cache hit rate: {local}%{outside}"
    )


SGLANG = {
    "2024": (
        "[2024-10-01 11:00:00 TP0] Prefill batch. #new-seq: 1, #new-token: 300, #cached-token: "
        "100, cache hit rate: 25.00%, token usage: 0.91, #running-req: 20, #queue-req: 70",
        "[2024-10-01 11:00:01 TP0] Decode batch. #running-req: 21, #token: 90000, token usage: "
        "0.93, gen throughput (token/s): 800.00, #queue-req: 69",
    ),
    "2025": (
        "[2025-07-18 15:32:52 TP0] Prefill batch. #new-seq: 1, #new-token: 300, #cached-token: "
        "100, #token: 35, token usage: 0.91, #running-req: 20, #queue-req: 70, timestamp: 2025",
        "[2025-07-18 15:32:54 TP0] Decode batch. #running-req: 21, #token: 2266, token usage: "
        "0.93, cuda graph: True, gen throughput (token/s): 800.00, #queue-req: 69, timestamp: 2025",
    ),
    "2026": (
        "[2026-08-14 08:17:30] Prefill batch [12], #new-seq: 3, #new-token: 300, #cached-token: "
        "100, full token usage: 0.91, mamba usage: 0.20, #running-req: 20, #queue-req: 70, "
        "#pending-token: 64, cuda graph: False, input throughput (token/s): 107534.31",
        "[2026-08-14 08:17:30] Decode batch, #running-req: 21, #full token: 1051, full token "
        "usage: 0.93, mamba num: 16, "
        "cuda graph: True, gen throughput (token/s): 800.00, #queue-req: 69",
    ),
}


def lmcache(text, rank=0):
    return (
        f"(VllmWorker rank={rank} pid=250) [2025-07-02 16:41:43,868] LMCache INFO: {text} "
        "(cache_engine.py:312:lmcache.v1.cache_engine)"
    )


SAMPLES = [
    v1(3, 9, 50.0, 12.0, 40.0, more=", Preemptions: 3"),
    *SGLANG["2024"],
    *SGLANG["2026"],
    "Avg prompt throughput: 5 tokens/s, Avg generation throughput: 3 tokens/s, Running: 3 reqs, "
    "Swapped: 2 reqs, Pending: 9 reqs, GPU KV cache usage: 9.0%, CPU KV cache usage: 1.0%.",
    "Prefix cache hit rate: GPU: 62.26%, CPU: 0.00%",
    "PreemptionMode.SWAP total_num_cumulative_preemption=51",
    "KV Transfer metrics: CPU_to_GPU_total_bytes=2e9, CPU_to_GPU_total_time=0.1, hits=3",
    "GPU KV cache size: 409,600 tokens, Maximum concurrency for 32,768 tokens per request: 12.50x",
    "ReqTimeStats(rid=a, input_len=4000, cached_input_len=10): queue_duration=1.5ms",
    "Prefetching 20 pages for request abc. Prefetch abc completed with 640 tokens",
    "max_total_num_tokens=655360, max_running_requests=128, context_len=32768",
    "KV cache pool is full. Retract requests. #retracted_reqs: 1",
    lmcache("Reqid: r1, Total tokens 1000, LMCache hit tokens: 800, need to load: -300"),
    lmcache("Retrieved 5 out of 9 tokens. size: 0.5 gb, cost 1.5 ms, throughput: 3.1 GB/s;"),
    'INFO: 10.0.0.7 - "POST /v1/completions HTTP/1.1" 200 OK',
]
PIECES = st.one_of(
    st.sampled_from(SAMPLES),
    st.builds(lambda line, cut: line[:cut], st.sampled_from(SAMPLES), st.integers(0, 250)),
    st.builds(
        lambda line, number: re.sub(r"\d+(\.\d+)?", number, line),
        st.sampled_from(SAMPLES),
        st.sampled_from(["", "0", "-1", "1.2.3", ",", "9" * 5000, "nan", "1e999", "٣"]),
    ),
    st.text(max_size=20),
)
