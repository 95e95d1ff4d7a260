"""A vLLM server that is well, and five that are not, by what a user has of them afterwards.

Metrics before and after a load, as vLLM 0.32 writes them on a server that idles by then, the load's
results, and the figures that only the user knows. `benchmarks/vllm_doctor.py` does the same to real
servers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from headstart.bench.run import Request, Run
from headstart.doctor.diagnose import diagnose
from headstart.doctor.facts import Known
from headstart.doctor.readers import Document, load

LABELS = 'engine="0",model_name="model"'


@dataclass(frozen=True)
class Asked:
    """One request, seconds by the engine's clock."""

    queue: float
    prefill: float
    prompt: int = 400
    hit: int = 0
    output: int = 10

    @property
    def ttft(self):
        return self.queue + self.prefill + 0.003


WARM_UP = Asked(queue=0.0, prefill=0.2, prompt=40, output=4)


@dataclass(frozen=True)
class Scenario:
    """What happened at a server, and what is known beside its metrics."""

    verdict: str
    rule: str
    asked: tuple[Asked, ...]
    concurrency: int = 1
    shareable: float = 0.0
    preempted: int = 0
    block: int = 32
    has_results: bool = True
    observed: str = ""
    more: dict[str, float] = field(default_factory=dict)
    """Counters of a connector."""

    def page(self, asked, preempted, more):
        """Metrics of an idle server that has answered these."""

        def told(name, values):
            yield f"{name}_sum{{{LABELS}}} {sum(values)}"
            yield f"{name}_count{{{LABELS}}} {float(len(values))}"

        lines = [
            f"vllm:num_requests_running{{{LABELS}}} 0.0",
            f"vllm:num_requests_waiting{{{LABELS}}} 0.0",
            f'vllm:num_requests_waiting_by_reason{{{LABELS},reason="capacity"}} 0.0',
            f'vllm:num_requests_waiting_by_reason{{{LABELS},reason="deferred"}} 0.0',
            f"vllm:kv_cache_usage_perc{{{LABELS}}} 0.0",
            f"vllm:prefix_cache_queries_total{{{LABELS}}} {sum(r.prompt for r in asked)}",
            f"vllm:prefix_cache_hits_total{{{LABELS}}} {0 if more else sum(r.hit for r in asked)}",
            f"vllm:num_preemptions_total{{{LABELS}}} {preempted}",
            f'vllm:cache_config_info{{{LABELS},block_size="{self.block}",num_gpu_blocks="56"}} 1.0',
            *told("vllm:request_prompt_tokens", [r.prompt for r in asked]),
            *told("vllm:request_generation_tokens", [r.output for r in asked]),
            *told("vllm:time_to_first_token_seconds", [r.ttft for r in asked]),
            *told("vllm:request_queue_time_seconds", [r.queue for r in asked]),
            *told("vllm:request_prefill_time_seconds", [r.prefill for r in asked]),
            *(f"{name}{{{LABELS}}} {value}" for name, value in more.items()),
        ]
        return "\n".join(lines) + "\n"

    def results(self):
        """As `headstart bench serve` writes them."""
        requests = [
            Request(
                session=str(number),
                prompt_tokens=each.prompt,
                output_tokens=each.output,
                ttft_s=each.ttft + 0.004,
                latency_s=each.ttft + 0.07 * each.output,
                cached_tokens=each.hit,
            )
            for number, each in enumerate(self.asked)
        ]
        spent = sum(each.latency_s for each in requests) / self.concurrency
        run = Run(
            tool="headstart",
            duration_s=spent,
            requests=tuple(requests),
            has_prefix_cache=True,
            pace={"rate": None, "concurrency": float(self.concurrency)},
            simulated_hit_rate=self.shareable,
        )
        return msgspec.json.encode(run).decode()

    def files(self):
        """In the order of time."""
        zero = dict.fromkeys(self.more, 0.0)
        yield "before.prom", self.page((WARM_UP,), 0, zero)
        if self.has_results:
            yield "load.json", self.results()
        yield "after.prom", self.page((WARM_UP, *self.asked), self.preempted, self.more)
        if self.observed:
            yield "observations.toml", self.observed


def waits(*seconds, prefill, **more):
    return tuple(Asked(queue=each, prefill=prefill, **more) for each in seconds)


SCENARIOS = {
    "well": Scenario(
        verdict="no_fault",
        rule="",
        asked=(
            Asked(queue=0.0, prefill=2.1, prompt=500),
            *waits(*[0.0] * 11, prefill=0.45, prompt=560, hit=450),
        ),
        shareable=0.8,
    ),
    # The first five come at once; each of the others waits until two of those that were thrown out
    # are in again.
    "small pool": Scenario(
        verdict="no_room",
        rule="preemption",
        asked=(
            *waits(0.0, 1.1, 1.1, 1.1, 1.1, prefill=4.0, prompt=300, output=300),
            *waits(2.0, 7.5, 9.0, 11.0, 17.0, prefill=1.4, prompt=300, output=300),
        ),
        concurrency=5,
        preempted=7,
    ),
    # As above, with prompts that are computed at once, so that half of them wait for room only.
    "small pool of a fast engine": Scenario(
        verdict="no_room",
        rule="preemption",
        asked=(
            *waits(*[0.0] * 6, prefill=0.3, prompt=300, output=300),
            *waits(12.0, 15.0, 21.0, 24.0, prefill=0.3, prompt=300, output=300),
        ),
        concurrency=5,
        preempted=9,
    ),
    "slow disk": Scenario(
        verdict="slow_tier",
        rule="load_slower",
        asked=waits(11.9, 12.2, 11.7, prefill=0.09, prompt=1000, hit=999),
        has_results=False,
        observed='[[arms]]\nname = "alone"\ncache = "off"\nttft_p50 = 5.4\n'
        '[[arms]]\nname = "with a disk"\ncache = "warm"\nttft_p50 = 12.0\n',
        more={
            "vllm:external_prefix_cache_queries_total": 3040.0,
            "vllm:external_prefix_cache_hits_total": 2997.0,
            "headstart:lookups_total": 4.0,
            "headstart:hits_total": 3.0,
            "headstart:wait_seconds_total": 35.7,
            "headstart:read_seconds_total": 35.7,
            "headstart:load_copy_seconds_total": 0.05,
            "headstart:load_bytes_total": 1.4e8,
        },
    ),
    # Half of the requests find something: the others are as slow as they were, and the median is
    # one of theirs.
    "slow disk, half of the time": Scenario(
        verdict="slow_tier",
        rule="load_slower",
        asked=(
            *waits(14.4, 15.2, prefill=0.08, prompt=1000, hit=999),
            *waits(0.0, 0.0, prefill=5.4, prompt=1000),
        ),
        has_results=False,
        observed='[[arms]]\nname = "alone"\ncache = "off"\nttft_p50 = 5.5\n'
        '[[arms]]\nname = "with a disk"\ncache = "warm"\nttft_p50 = 5.4\n',
        more={
            "vllm:external_prefix_cache_queries_total": 4040.0,
            "vllm:external_prefix_cache_hits_total": 1998.0,
            "headstart:lookups_total": 5.0,
            "headstart:hits_total": 2.0,
            "headstart:wait_seconds_total": 29.5,
            "headstart:load_copy_seconds_total": 0.03,
            "headstart:load_bytes_total": 9.4e7,
        },
    ),
    "large blocks": Scenario(
        verdict="block_size",
        rule="block_too_large",
        asked=waits(*[0.0] * 8, prefill=1.7),
        shareable=0.65,
        block=512,
        observed="shared_tokens = 300\n",
    ),
    "the time in front": Scenario(
        verdict="configuration",
        rule="volatile_prompt",
        asked=waits(*[0.0] * 8, prefill=1.9, prompt=470),
        has_results=False,
        observed="template_tokens = 409\nfirst_difference = 0\n",
    ),
    "crowded": Scenario(
        verdict="routing",
        rule="queue_dominates",
        asked=waits(0.0, 0.8, *range(3, 13), *[13.0] * 24, prefill=0.9, prompt=200, output=20),
        concurrency=12,
    ),
}


def known(scenario):
    documents = [Document(path=name, text=text) for name, text in scenario.files()]
    return Known(load(documents).facts)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_verdict(name):
    scenario = SCENARIOS[name]
    said = diagnose(known(scenario))
    assert said.verdict == scenario.verdict
    assert [finding.rule for finding in said.findings][:1] == [scenario.rule] * bool(scenario.rule)


@pytest.mark.parametrize("name", SCENARIOS)
def test_stages_fill_the_first_token_and_no_more(name):
    (split,) = diagnose(known(SCENARIOS[name])).splits
    assert abs(split.stages[-1].seconds) < 0.05 * split.ttft_s


def test_a_slow_load_is_no_queue():
    said = diagnose(known(SCENARIOS["slow disk"]))
    stages = {stage.name: stage.seconds for stage in said.splits[0].stages}
    assert stages["load"] == pytest.approx(11.917, abs=0.01)
    assert stages["queue"] == pytest.approx(0.033, abs=0.01)
    assert [finding.cause for finding in said.findings] == ["slow_tier"]


def test_a_server_that_idles_when_it_is_asked_says_nothing_about_room():
    arm = known(SCENARIOS["small pool"]).situations[0]
    assert arm.number("running") == arm.number("waiting") == 0
    assert arm.fact("kv_usage") is None


def test_ten_requests_have_a_slowest_tenth():
    assert known(SCENARIOS["small pool"]).arms[0].number("ttft_p90") > 10
    assert known(SCENARIOS["large blocks"]).arms[0].number("ttft_p90") is None
