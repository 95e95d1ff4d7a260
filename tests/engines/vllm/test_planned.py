"""Engines that load what comes sooner than it is computed: vLLM's scheduler, connector and a node.

The make-believe workers take a time a token here, as real ones do, and know it from the start.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from headstart.costs import EngineCosts, EngineModel, ReadCosts
from headstart.node.promise import Promise
from headstart.testing import Fault
from vllm_cases import ASYNC, BLOCK, SYNC, tokens

pytest.importorskip("vllm")

# The warnings of vLLM's own imports are not ours to mend.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

TOKEN_S = 0.004
SLOW = EngineCosts(
    step_s=0.001,
    token_s=TOKEN_S,
    pair_s=0.0,
    uncertainty=0.05,
    max_step_tokens=1024,
    copy_bytes_per_s=1e9,
)
FAST = replace(SLOW, step_s=1e-5, token_s=TOKEN_S / 100)
BLOCK_NBYTES = 6144
NOISE_S = 0.5
"""That a shared machine may add."""


@pytest.fixture
def believe(monkeypatch):
    """Sets what engines believe of their speed at first."""
    from headstart.engines.vllm import connector

    return lambda costs: monkeypatch.setattr(connector, "prior_costs", lambda config: costs)


@pytest.fixture
def slow(harness, fresh, believe, monkeypatch):
    """Starts planned engines that compute slowly, and know it."""
    execute = harness.Worker.execute

    def computing(worker, output):
        time.sleep(TOKEN_S * output.total_num_scheduled_tokens)
        return execute(worker, output)

    monkeypatch.setattr(harness.Worker, "execute", computing)
    believe(SLOW)
    return lambda extra=None, **options: fresh(
        extra={"load": "planned", "lookup_budget": 0.2, **(extra or {})}, **options
    )


@pytest.fixture
def sure(monkeypatch):
    """Engines stay sure of what they believe, however unevenly a busy machine lets them compute."""
    monkeypatch.setattr(EngineModel, "step", lambda *args: None)


@pytest.fixture(autouse=True)
def _no_hook_fails(monkeypatch):
    from headstart.engines.vllm.connector import HeadstartConnector

    errors = []
    monkeypatch.setattr(HeadstartConnector, "_failed_in", lambda *args: errors.append(args[1:]))
    yield
    assert errors == []


@pytest.fixture
def on_disk(node, filled, monkeypatch):
    """A prompt of which only the file tier holds six blocks, which are read one by one."""
    monkeypatch.setattr("headstart.tiers.filebatch.COALESCE_NBYTES", 1)
    node.settled()
    node.restart()
    return filled


def teach(node, block_s):
    """Let the node expect a block to take so long to read."""
    costs = ReadCosts(
        fixed_s=0.0,
        bytes_per_s=BLOCK_NBYTES / block_s,
        lag_nbytes=2 * BLOCK_NBYTES,
        uncertainty=0.05,
    )
    node.services.devices.by_tier["file"].costs = lambda *args: costs


def decisions(node, engine):
    """All that is known of requests, by name."""
    engine.settle()
    engine.side._client.flush()
    node.settled()
    found = {}
    for each in node.services.decisions.after(0)["decisions"]:
        found.setdefault(each["request_id"], []).append(each)
    return found


def stall_at(node, number):
    """Let the tier stall from its `number`-th I/O of now on."""
    seen = []

    def schedule(n):
        seen.append(n)
        if len(seen) == number + 1:
            node.slow.stall()
        return Fault()

    node.slow.schedule = schedule


# ---------------------------------------------------------------------------------- load or compute


@pytest.mark.usefixtures("sure")
@pytest.mark.parametrize("extra", [SYNC, ASYNC])
def test_a_read_that_is_worth_it_is_waited_for(node, on_disk, slow, extra):
    teach(node, 0.02)
    node.slow.schedule = lambda n: Fault(latency_s=0.02)
    engine = slow(extra)
    told = engine.ask("reads", on_disk, 2)
    assert (told["outcome"], told["reason"]) == ("hit", "load")
    assert told["loaded_tokens_by_tier"] == {"file": 96}
    assert "late" not in told
    ((made,),) = decisions(node, engine).values()
    assert made["found_by_tier"] == {"memory": 0, "file": 96}
    assert 0.03 < made["actual_load_s"] < 0.3
    assert 0.1 < made["saved_s"] < 0.4
    assert made["regret_s"] < 0.15


@pytest.mark.usefixtures("sure")
def test_a_read_that_is_complete_is_not_late_though_nobody_has_told_its_end(
    node, on_disk, slow, monkeypatch
):
    poll = Promise.poll
    monkeypatch.setattr(Promise, "poll", lambda promise: (False, poll(promise)[1]))
    teach(node, 0.005)
    told = slow().ask("reads", on_disk, 2)
    assert (told.get("loaded_tokens"), told.get("late")) == (96, None)


@pytest.mark.usefixtures("sure")
def test_a_read_that_is_faster_than_expected_is_not_left(node, on_disk, slow):
    teach(node, 0.05)
    node.slow.schedule = lambda n: Fault(latency_s=0.01)
    told = slow().ask("reads", on_disk, 2)
    assert (told.get("loaded_tokens"), told.get("late")) == (96, None)


def test_what_comes_too_late_is_computed_and_in_memory_the_next_time(node, on_disk, slow):
    teach(node, 0.2)
    node.slow.schedule = lambda n: Fault(latency_s=0.4)
    engine = slow()
    told = engine.ask("computes", on_disk, 2)
    assert (told["outcome"], told["held_tokens"]) == ("declined", 96)
    assert told["reason"] in ("slow", "risky")
    assert told["stored_blocks"] == 6
    ((made,),) = decisions(node, engine).values()
    assert (made["reason"], made["loaded_tokens"]) == (told["reason"], 0)
    assert made["regret_s"] < 0.1
    engine.scheduler.reset_prefix_cache()
    told = engine.ask("hits", on_disk, 2)
    assert told["loaded_tokens_by_tier"] == {"memory": 96}
    engine.settle()


def test_what_an_engine_has_learnt_is_known_to_the_next_one(node, on_disk, slow, believe):
    believe(FAST)
    teach(node, 0.02)
    engine = slow()
    assert engine.ask("knows nothing", on_disk)["outcome"] == "declined"
    for n in range(17):
        engine.ask(f"learns {n}", tokens(4 + n, seed=n + 1))
    node.settled()
    node.forget_memory()
    engine = slow()
    told = engine.ask("knows", on_disk)
    assert told["loaded_tokens_by_tier"] == {"file": 96}
    assert engine.side._pace.costs.token_s == pytest.approx(TOKEN_S, rel=0.5)
    engine.settle()


# ------------------------------------------------------------------------------------------ waiting


@pytest.mark.usefixtures("sure")
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("ready", [0, 2, 4])
def test_a_read_that_stalls_is_left_with_what_is_ready(node, on_disk, slow, ready, beside):
    """Alone, and beside a request that generates meanwhile."""
    teach(node, 0.05)
    engine = slow({"stall": 60.0})
    engine.side._client.connect()
    if beside:
        engine.add("beside", tokens(5, seed=1), 165)
        engine.steps(2)
    stall_at(node, ready)
    engine.add("stalls", on_disk)
    promise = engine.side._records["stalls"].promise
    while promise.poll()[1] < ready:
        time.sleep(0.001)
    started = time.monotonic()
    engine.run(until=lambda: engine.answers["stalls"])
    seconds = time.monotonic() - started
    node.slow.schedule = lambda n: Fault()
    node.slow.resume()
    engine.abort("beside")
    (made,) = decisions(node, engine)["stalls"]
    print(f"{ready} ready: {seconds:.3f} s, {made}")
    assert made["is_late"]
    assert made["loaded_tokens"] == ready * BLOCK
    assert made["actual_load_s"] <= made["deadline_s"] + ready * BLOCK * TOKEN_S + NOISE_S
    assert seconds <= 101 * TOKEN_S + made["deadline_s"] + 2 * NOISE_S


@pytest.mark.usefixtures("sure")
@pytest.mark.parametrize("others", [100, 10])
def test_those_behind_do_not_overtake_for_longer_than_is_worth_it(node, on_disk, slow, others):
    teach(node, 0.05)
    engine = slow({"stall": 60.0})
    engine.side._client.connect()
    stall_at(node, 0)
    started = time.monotonic()
    engine.add("first", on_disk)
    number = 0
    while not engine.answers["first"]:
        assert number < 30
        engine.add(f"{number}", tokens(others, seed=number + 1))
        engine.step()
        number += 1
    seconds = time.monotonic() - started
    node.slow.schedule = lambda n: Fault()
    node.slow.resume()
    (made,) = decisions(node, engine)["first"]
    print(f"{number} others of {others}: {seconds:.3f} s, {made}")
    # One more may be in the step that computes it, or have been when it stopped.
    assert seconds <= (101 + 2 * others) * TOKEN_S + made["deadline_s"] + 2 * NOISE_S


def test_time_without_room_in_the_engine_is_not_time_to_load(node, filled, slow):
    engine = slow(blocks=12)
    engine.add("large", tokens(90, seed=1), 60)
    engine.steps(2)
    engine.add("waits", filled)
    (made,) = decisions(node, engine)["waits"]
    assert engine.told["waits"]["loaded_tokens"] == 96
    assert made["actual_load_s"] < 30 * TOKEN_S  # it has waited for more than 60 steps in all
    assert made["regret_s"] < 30 * TOKEN_S


def test_a_load_that_failed_is_not_said_to_have_been_fast(node, filled, slow):
    engine = slow()
    copier = engine.workers[0].connector._worker._copier

    def fail(blocks, arena):
        raise RuntimeError("injected")

    copier.load = fail
    assert engine.ask("fails", filled)["outcome"] == "failed"
    (made,) = decisions(node, engine)["fails"]
    assert made["actual_prefill_s"] > 96 * TOKEN_S
    assert engine.side._pace.costs.copy_bytes_per_s == SLOW.copy_bytes_per_s  # nothing was copied
