"""Anything in any order: arrivals, aborts, resets, faults. The bytes are right, nothing is left."""

from __future__ import annotations

import functools
import shutil

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headstart.node.client import ClientLimits
from vllm_cases import tokens

pytest.importorskip("vllm")

# The warnings of vLLM's own imports are not ours to mend.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

LIMITS = ClientLimits(ask_s=20.0, open_s=20.0, retry_s=0.01, max_retry_s=0.02)
LENGTHS = st.sampled_from([1, 15, 16, 17, 31, 32, 48, 63, 64, 65, 96, 100])


class Machine(RuleBasedStateMachine):
    """An engine and a node, of which each can be replaced."""

    make_engine = make_node = folder = None
    names = Bundle("names")

    @initialize(
        options=st.fixed_dictionaries(
            {
                "overlap": st.booleans(),
                "ranks": st.sampled_from([1, 1, 1, 2]),
                "blocks": st.sampled_from([12, 16, 40]),
                "max_num_batched_tokens": st.sampled_from([24, 64, 1024]),
                "extra": st.sampled_from(
                    [{}, {"async_load_nbytes": 4096, "step_nbytes": 8192}, {"step_nbytes": 4096}]
                ),
            }
        ),
        memory_blocks=st.sampled_from([4, 16, 128]),
    )
    def start(self, options, memory_blocks):
        extra = {"stall": 0.05, "max_wait": 0.2, **options["extra"]}
        self.options = {**options, "extra": extra}
        self.node = self.make_node(self.folder, memory_blocks=memory_blocks, file_blocks=256)
        self.asked, self.num_faults, self.may_end_in_error = [], 0, False
        self.engine = self.new_engine()

    def new_engine(self):
        engine = self.make_engine(self.node.path, **self.options)
        for worker in engine.workers:
            worker.connector._mapping._retry_s = 0.0
            self.guard(worker.connector._worker._copier)
        return engine

    def guard(self, copier):
        for name in ("load", "store"):
            setattr(copier, name, functools.partial(self.copy, getattr(copier, name)))

    def copy(self, inner, *args):
        if self.num_faults:
            self.num_faults -= 1
            self.may_end_in_error = self.options["overlap"]
            raise RuntimeError("the copy failed")
        inner(*args)

    @rule(
        target=names,
        shared=LENGTHS,
        own=LENGTHS,
        seed=st.integers(0, 2),
        count=st.sampled_from([1, 2, 20, 40]),
        salt=st.sampled_from([None, None, None, "salt"]),
        logprobs=st.sampled_from([None, None, None, 1]),
    )
    def arrive(self, shared, own, seed, count, salt, logprobs):
        prompt = (tokens(shared) + tokens(own, seed=seed))[:130]
        name = f"{len(self.asked)}"
        self.asked.append((prompt, salt))
        self.engine.add(name, prompt, count, salt=salt, prompt_logprobs=logprobs)
        return name

    @rule(count=st.integers(1, 4))
    def step(self, count):
        self.engine.steps(count)

    @rule()
    def run(self):
        self.node.slow.resume()
        self.engine.run()

    @rule(name=consumes(names), late=st.booleans())
    def abort(self, name, late):
        self.engine.abort(name, late=late)

    @rule()
    def forget_locally(self):
        self.engine.scheduler.reset_prefix_cache()

    @rule()
    @precondition(lambda self: not self.engine.scheduler.has_requests())
    def new_weights(self):
        self.engine.reset()

    @rule()
    def new_weights_while_running(self):
        engine = self.engine
        loading = any("REMOTE" in each.status.name for each in engine.scheduler.requests.values())
        if not loading and not engine.scheduler.has_finished_requests():
            engine.reset(reset_running_requests=True)

    @rule(count=st.integers(1, 3))
    def copies_fail(self, count):
        self.num_faults = count

    @rule()
    def media_stall(self):
        self.node.slow.stall()

    @rule()
    def media_flow(self):
        self.node.slow.resume()

    @rule()
    def memory_forgets(self):
        self.node.slow.resume()
        self.node.forget_memory()

    @rule()
    def node_forgets(self):
        self.node.services.clear("")

    @rule()
    def node_restarts(self):
        self.node.restart()

    @rule()
    def engine_restarts(self):
        self.engine.check_reads()
        self.engine.close()
        self.engine = self.new_engine()

    def teardown(self):
        self.num_faults = 0
        self.node.slow.resume()
        engine = self.engine
        try:
            engine.settle()
            assert set(engine.reasons.values()) <= {"length", "abort", "error"}
            assert "error" not in engine.reasons.values() or self.may_end_in_error
            if engine.side._client.connect():
                self.node.settled()
            engine.close()
            # What is stored is right.
            engine = self.new_engine()
            for number, (prompt, salt) in enumerate(self.asked):
                engine.add(f"{number}", prompt, salt=salt)
            engine.settle()
        finally:
            engine.close()
            self.node.stop()
            shutil.rmtree(self.node.root)


def test_anything_in_any_order(harness, tiny_folder, tmp_path, monkeypatch, node_class):
    from headstart.engines.vllm import connector

    client = functools.partial(connector.NodeClient, limits=LIMITS)
    monkeypatch.setattr(connector, "NodeClient", client)
    count = iter(range(1_000_000))

    def make_node(folder, **options):
        root = folder / f"{next(count)}"
        root.mkdir(mode=0o700)
        return node_class(root, **options)

    class Here(Machine):
        folder = tmp_path
        make_engine = staticmethod(functools.partial(harness.Engine, tiny_folder))

    Here.make_node = staticmethod(make_node)
    run_state_machine_as_test(Here, settings=settings(stateful_step_count=30))
