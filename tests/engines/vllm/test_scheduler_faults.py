"""Whatever breaks is a miss: copies that fail, nodes that go, media that lie, bugs in hooks."""

from __future__ import annotations

import functools
import importlib
import random

import pytest

from headstart.node import protocol
from headstart.node.client import ClientLimits
from vllm_cases import ASYNC, SYNC, tokens

pytest.importorskip("vllm")

# The warnings of vLLM's own imports are not ours to mend.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BRIEF = ClientLimits(ask_s=0.3, open_s=0.5, retry_s=0.02, max_retry_s=0.05)


class Failing:
    """Replaces a method by one that raises where `when(number of the call)` holds."""

    def __init__(self, owner, name, when, error=RuntimeError):
        self._owner, self._name, self._inner = owner, name, getattr(owner, name)
        self._when, self._error = when, error
        self.num_calls = self.num_raised = 0
        setattr(owner, name, self)

    def __call__(self, *args, **kwargs):
        self.num_calls += 1
        if self._when(self.num_calls - 1):
            self.num_raised += 1
            raise self._error("injected")
        return self._inner(*args, **kwargs)

    def __get__(self, instance, owner):
        """On a class it is a method, like the one that it replaces."""
        return self if instance is None else functools.partial(self, instance)

    def stop(self):
        setattr(self._owner, self._name, self._inner)


def copier_of(engine, rank=0):
    return engine.workers[rank].connector._worker._copier


# ------------------------------------------------------------------------------------ failed copies


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget", [32, 1024])
def test_a_load_that_fails_is_computed(node, fresh, ranks, budget):
    options = {"ranks": ranks, "max_num_batched_tokens": budget}
    prompt = tokens(100)
    fresh(**options).ask("fill", prompt)
    node.settled()
    engine = fresh(**options)
    failing = Failing(copier_of(engine, ranks - 1), "load", lambda n: n == 0)
    told = engine.ask("fails", prompt + tokens(30, seed=1), 4)
    assert failing.num_raised == 1
    assert told["outcome"] == "failed"
    engine.settle()
    # Nothing of the step that computed on garbage was stored, and its blocks are now.
    engine.scheduler.reset_prefix_cache()
    assert engine.ask("replay", prompt + tokens(30, seed=1))["loaded_tokens"] == 128
    engine.settle()
    node.settled()


@pytest.mark.parametrize("then", ["abort one", "abort all", "abort late", "nothing"])
@pytest.mark.parametrize("budget", [32, 1024])
@pytest.mark.parametrize("count", [1, 3])
def test_blocks_that_failed_to_load_are_nobodys_hit(node, filled, fresh, count, budget, then):
    """vLLM puts blocks into its own cache before they are loaded, and leaves them there."""
    engine = fresh(max_num_batched_tokens=budget)
    Failing(copier_of(engine), "load", lambda n: n == 0)
    for n in range(count):
        engine.add(f"{n}", filled + tokens(30, seed=n), 4)
    if then == "abort late":
        engine.abort("0", late=True)
    engine.step()
    if then == "abort one":
        engine.abort("0")
    elif then == "abort all":
        engine.abort(*(f"{n}" for n in range(count)))
    engine.add("later", filled + tokens(30, seed=9), 4)
    engine.settle()
    assert engine.reasons["later"] == "length"
    node.settled()


@pytest.mark.parametrize("blocks", [14, 20])
def test_failed_loads_while_requests_are_preempted(node, fresh, blocks):
    prompts = [tokens(40) + tokens(10 + 13 * n, seed=n) for n in range(5)]
    for rounds in range(3):
        engine = fresh(blocks=blocks, max_num_batched_tokens=48)
        if rounds:
            Failing(copier_of(engine), "load", lambda n: n % 2 == 0)
        for n, prompt in enumerate(prompts):
            engine.add(f"{n}", prompt, 50)
        engine.settle()
        assert set(engine.reasons.values()) == {"length"}
        node.settled()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_store_that_fails_is_tried_again(node, fresh, ranks):
    engine, prompt = fresh(ranks=ranks, max_num_batched_tokens=32), tokens(100)
    failing = Failing(copier_of(engine, ranks - 1), "store", lambda n: n == 1)
    engine.ask("fill", prompt, 20)
    assert failing.num_raised == 1
    engine.settle()
    node.settled()
    other = fresh(ranks=ranks, max_num_batched_tokens=32)
    assert other.ask("replay", prompt)["loaded_tokens"] == 96
    other.settle()
    node.settled()


@pytest.mark.parametrize("then", ["abort", "abort late", "nothing"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("length", [20, 90])
def test_a_failed_load_with_overlapping_steps(node, fresh, ranks, length, then):
    """The next step is scheduled, and computes on the same garbage, before anybody knows."""
    options = {"ranks": ranks, "overlap": True, "max_num_batched_tokens": 32}
    prompt = tokens(64)
    fresh(**options).ask("fill", prompt)
    node.settled()
    engine = fresh(**options)
    Failing(copier_of(engine, ranks - 1), "load", lambda n: n == 0)
    for n in range(2):
        engine.add(f"fails {n}", prompt + tokens(length, seed=n), 4)
    engine.steps(2)
    if then != "nothing":
        engine.abort("fails 0", late=then == "abort late")
    engine.run()  # what is answered is checked; what cannot be is an error
    if length == 20:  # both were in the step
        assert engine.reasons["fails 1"] == "error"
    engine.scheduler.reset_prefix_cache()
    engine.settle_halves()
    node.settled()
    other = fresh(**options)
    other.ask("replay", prompt + tokens(90, seed=1), 4)
    other.settle()
    node.settled()


# -------------------------------------------------------------------------------------------- nodes


def test_a_node_that_never_was(tmp_path, make_engine):
    engine = make_engine(tmp_path / "nobody.sock", limits=BRIEF)
    told = engine.ask("alone", tokens(100), 4)
    assert told["outcome"] == "no node"
    for n in range(3):
        engine.add(f"{n}", tokens(100, seed=n), 4)
    engine.settle()


def test_a_node_that_comes_later(tmp_path, make_node, make_engine, soon):
    engine = make_engine(tmp_path / "node0" / "node.sock", limits=BRIEF)
    engine.workers[0].connector._mapping._retry_s = 0.0
    prompt = tokens(100)
    assert engine.ask("alone", prompt)["outcome"] == "no node"
    node = make_node()
    soon(lambda: engine.ask("warm up", tokens(40, seed=7)).get("stored_blocks"))
    engine.ask("stores", prompt, 1)
    engine.scheduler.reset_prefix_cache()
    assert soon(lambda: engine.ask("reads", prompt).get("loaded_tokens"))
    engine.settle()
    node.settled()


def busy(engine, step, prompt):
    """A load of two requests that read and write, of which `step` have passed."""
    engine.scheduler.reset_prefix_cache()
    for n in range(2):
        engine.add(f"{step} {n}", prompt + tokens(30, seed=f"{step} {n}"), 20)
    engine.steps(step)


@pytest.mark.parametrize("extra", [SYNC, ASYNC])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_node_restarts_between_any_two_steps(node, filled, make_engine, overlap, extra):
    engine = make_engine(
        node.path, limits=BRIEF, extra=extra, overlap=overlap, max_num_batched_tokens=48
    )
    engine.workers[0].connector._mapping._retry_s = 0.0
    for step in range(10):
        busy(engine, step, filled)
        node.restart()
        engine.steps(step % 3)
        engine.settle()
        assert set(engine.reasons.values()) == {"length"}
        node.settled()
    assert any(told.get("loaded_tokens") for told in engine.told.values())


@pytest.mark.parametrize("extra", [SYNC, ASYNC])
def test_the_node_restarts_within_a_step(node, filled, make_engine, extra):
    """What the old one gave is not looked for in the new one's memory."""
    limits = ClientLimits(ask_s=5.0, open_s=5.0, retry_s=0.0, max_retry_s=0.0)
    engine = make_engine(node.path, limits=limits, extra=extra)
    engine.workers[0].connector._mapping._retry_s = 0.0
    step = engine.side.step

    def restart_before(output):
        if engine.side._loading:
            engine.side.step = step
            node.restart()
            assert not engine.side._client._ask(protocol.Status(), protocol.State)
            assert engine.side._client.connect()
        return step(output)

    engine.side.step = restart_before
    for n in range(2):
        engine.add(f"{n}", filled + tokens(30, seed=n), 4)
    engine.settle()
    assert engine.side.step == step
    node.settled()


@pytest.mark.parametrize("extra", [SYNC, ASYNC])
@pytest.mark.parametrize("fault", ["kill", "freeze", "restart"])
def test_the_nodes_process_ends_or_hangs_between_any_two_steps(
    process_node, make_engine, fault, extra, soon
):
    node, prompt = process_node, tokens(100)
    engine = make_engine(node.path, limits=BRIEF, extra=extra, max_num_batched_tokens=48)
    engine.workers[0].connector._mapping._retry_s = 0.0
    engine.workers[0].connector._mapping._timeout_s = 0.3
    engine.ask("fill", prompt, 2)
    for step in range(4):
        busy(engine, step, prompt)
        if fault == "freeze":
            node.freeze()
        else:
            node.kill() if fault == "kill" else node.stop()
        if fault == "restart":
            node.start()
        engine.settle()
        assert set(engine.reasons.values()) == {"length"}
        if fault == "kill":
            node.start()
        elif fault == "freeze":
            node.thaw()
        soon(engine.side._client.connect)  # then the node learns what it holds for nobody
        engine.ask(f"{step} after", prompt)
        engine.settle()
        node.settled()


def test_damaged_files_are_never_read(node, filled, fresh):
    engine = fresh(blocks=128)
    prompts = [filled + tokens(60, seed=n) for n in range(8)]
    for n, prompt in enumerate(prompts):
        engine.ask(f"{n}", prompt)
    engine.settle()
    node.settled()
    for rounds in range(3):
        node.stop()
        chooser = random.Random(rounds)
        for slab in (node.root / "file").rglob("*.slab"):
            data = bytearray(slab.read_bytes())
            used = [page for page in range(0, len(data), 4096) if any(data[page : page + 4096])]
            for page in chooser.sample(used, len(used) // 8):
                data[page + chooser.randrange(4096)] ^= 1 << chooser.randrange(8)
            slab.write_bytes(data)
        node.start()
        other = fresh(blocks=128)
        for n, prompt in enumerate(prompts):
            other.add(f"{n}", prompt, 3)
        other.settle()
        node.settled()


@pytest.mark.parametrize("extra", [SYNC, ASYNC])
def test_a_medium_that_fails_or_stalls(node, filled, fresh, extra):
    from headstart.testing import Fault

    for schedule in (
        lambda n: Fault(fails=n % 3 == 0),
        lambda n: Fault(fails=True),
        lambda n: Fault(latency_s=0.05 * (n % 2)),
    ):
        node.settled()
        node.restart()
        node.slow.schedule = schedule
        engine = fresh(extra={**extra, "stall": 0.02})
        for n in range(3):
            engine.add(f"{n}", filled + tokens(20, seed=n), 3)
        engine.settle()
        assert set(engine.reasons.values()) == {"length"}
        node.settled()


# -------------------------------------------------------------------------------------------- hooks

SCHEDULER_HOOKS = [
    "on_new_request", "num_matched", "admitted", "sources", "step", "workers_told",
    "request_finished", "_store", "_reserve", "_promote", "_claim", "_settle",
]  # fmt: skip
RECORD_HOOKS = ["chain", "drop", "extend", "see", "tell_load", "tokens"]
WORKER_HOOKS = ["load", "store", "take_received", "take_lost_blocks", "take_meta", "_copy"]


@pytest.mark.parametrize("extra", [SYNC, ASYNC])
@pytest.mark.parametrize("hook", [*SCHEDULER_HOOKS, *RECORD_HOOKS, *WORKER_HOOKS])
def test_an_error_in_a_hook_is_a_miss(node, filled, fresh, hook, extra, monkeypatch):
    for failing_call in (0, 1, 4):
        engine = fresh(extra=extra, blocks=32, max_num_batched_tokens=64)
        if hook in SCHEDULER_HOOKS:
            owner = engine.side
        elif hook in RECORD_HOOKS:
            owner = importlib.import_module("headstart.engines.vllm.record").Record
            monkeypatch.setattr(owner, hook, getattr(owner, hook))  # put back whatever happens
        else:
            owner = engine.workers[0].connector._worker
        failing = Failing(owner, hook, lambda n, failing_call=failing_call: n == failing_call)
        for n in range(3):
            engine.add(f"{n}", filled + tokens(30, seed=n), 4)
        engine.step()
        engine.abort("1")
        engine.run()
        engine.check_reads()
        assert engine.reasons["0"] == engine.reasons["2"] == "length"
        failing.stop()
        # It goes on as before.
        engine.scheduler.reset_prefix_cache()
        assert engine.ask("later", filled, 4)["loaded_tokens"] == 96
        engine.close()
        node.services.sessions.sweep()
        other = fresh()
        for n in range(3):
            other.ask(f"{n}", filled + tokens(30, seed=n), 4)
        other.settle()
