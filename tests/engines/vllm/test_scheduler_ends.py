"""Requests that end early, are preempted, or are overtaken by new weights."""

from __future__ import annotations

import pytest

from vllm_cases import ASYNC, SYNC, tokens

pytest.importorskip("vllm")

# The warnings of vLLM's own imports are not ours to mend.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


# ------------------------------------------------------------------------------------------ aborts


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("extra", [SYNC, ASYNC])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_after_any_step(node, filled, fresh, extra, overlap, late):
    engine = fresh(extra=extra, overlap=overlap, max_num_batched_tokens=32)
    for steps in range(14):
        engine.scheduler.reset_prefix_cache()
        for name in ("aborted", "twin"):
            engine.add(f"{name} {steps}", filled + tokens(20, seed=steps), 4)
        engine.steps(steps)
        engine.abort(f"aborted {steps}", late=late)
        engine.run()
        engine.settle()
        node.settled()
    assert len(engine.told) >= 14


def test_an_abort_while_the_node_reads(node, filled, fresh):
    engine = fresh(extra={"stall": 60.0, "max_wait": 60.0})
    node.settled()
    node.restart()
    node.slow.stall()
    engine.side._client.connect()
    for name in ("aborted", "kept"):
        engine.add(name, filled)
    engine.steps(5)
    assert engine.scheduler.deferred_waiting
    engine.abort("aborted")
    engine.steps(5)
    node.slow.resume()
    engine.settle()
    assert engine.told["kept"]["loaded_tokens"] == 96
    node.settled()


def test_a_request_id_is_used_again(node, filled, fresh):
    engine = fresh(extra=ASYNC)
    for steps in range(6):
        engine.add("same", filled, 3)
        engine.steps(steps)
        engine.abort("same")
        engine.run()
    assert engine.ask("same", filled, 3)
    engine.settle()
    node.settled()


def test_a_claim_without_room_in_the_engine_is_undone(node, filled, fresh, soon):
    engine = fresh(blocks=12)
    engine.add("large", tokens(90, seed=1), 60)
    engine.steps(2)
    engine.add("waits", filled)
    for _ in range(5):
        engine.step()
        soon(lambda: node.gauges()["leases_claimed"] == 0)
        assert node.gauges()["leases"] == 1
        assert not engine.side._claims
    engine.settle()
    assert engine.told["waits"]["loaded_tokens"] == 96
    node.settled()


@pytest.mark.parametrize("is_held", [True, False])
def test_a_lease_that_expires_before_there_is_room_is_asked_for_again(
    node, filled, fresh, soon, is_held
):
    """Else the longer the queue, the more of what was loaded would be computed all the same."""
    engine = fresh(blocks=12)
    engine.add("large", tokens(90, seed=1), 60)
    engine.steps(2)
    engine.add("waits", filled)
    engine.step()
    soon(lambda: node.gauges()["leases_claimed"] == 0)
    sessions = node.services.sessions
    sessions._clock, now = lambda: now + 3600.0, sessions._clock()
    assert sessions.sweep() == 1
    if not is_held:
        node.services.clear("")
    engine.step()
    engine.settle()
    told = engine.told["waits"]
    assert told["outcome"] == ("hit" if is_held else "expired"), told
    assert told.get("loaded_tokens", 0) == (96 if is_held else 0)
    node.settled()


def test_a_claim_whose_request_is_aborted_before_it_is_admitted(node, filled, fresh):
    engine = fresh(blocks=12)
    engine.add("large", tokens(90, seed=1), 60)
    engine.steps(2)
    engine.add("waits", filled)
    engine.step()
    engine.abort("waits")
    engine.step()
    engine.abort("large")
    engine.settle()
    node.settled()


# ------------------------------------------------------------------------------------- preemptions


@pytest.mark.parametrize("extra", [SYNC, ASYNC])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("blocks", [14, 20])
def test_preempted_requests_come_back_to_the_right_bytes(node, fresh, blocks, overlap, extra):
    prompts = [tokens(40) + tokens(10 + 13 * n, seed=n) for n in range(5)]
    for _ in range(2):
        engine = fresh(blocks=blocks, overlap=overlap, extra=extra, max_num_batched_tokens=48)
        requests = [engine.add(f"{n}", prompt, 50) for n, prompt in enumerate(prompts)]
        engine.run()
        assert sum(request.num_preemptions for request in requests)
        assert set(engine.reasons.values()) == {"length"}
        engine.settle()
        node.settled()


# --------------------------------------------------------------------------------------- resetting


def test_after_a_reset_no_old_block_is_hit_again(node, filled, fresh):
    engine = fresh()
    assert engine.ask("before", filled, 20)["outcome"] == "hit"
    for _ in range(2):
        assert engine.reset()
        told = engine.ask("after", filled, 20)
        assert (told["outcome"], told["stored_blocks"]) == ("miss", 7)
        engine.scheduler.reset_prefix_cache()
        told = engine.ask("again", filled, 20)
        assert told["loaded_tokens"] == 96
    engine.settle()
    # What was there for the weights on disk is still there, for a process that has them.
    other = fresh()
    assert other.ask("other", filled, 20)["loaded_tokens"] == 96
    other.settle()
    node.settled()


@pytest.mark.parametrize("extra", [SYNC, ASYNC])
@pytest.mark.parametrize("overlap", [False, True])
def test_requests_across_a_reset(node, filled, fresh, overlap, extra):
    """Whatever was waiting or running: what was looked up before is not loaded after."""
    for steps in range(10):
        engine = fresh(overlap=overlap, extra=extra, max_num_batched_tokens=32, max_num_seqs=2)
        for n in range(4):
            engine.add(f"{n}", filled + tokens(20, seed=n), 6)
        engine.steps(steps)
        # vLLM refuses while a request is loading, after it has preempted the others.
        loading = any("REMOTE" in each.status.name for each in engine.requests.values())
        if loading:
            with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
                engine.reset(reset_running_requests=True)
        else:
            assert engine.reset(reset_running_requests=True)
        engine.settle()
        assert set(engine.reasons.values()) == {"length"}
        told = engine.ask("later", filled, 2)
        assert told["outcome"] in ("local", "miss") if not loading else "hit"
        engine.settle()
        node.settled()
        other = fresh()  # and nothing of the new weights went under the old name
        other.ask("other", filled + tokens(20), 6)
        other.settle()


def test_a_reset_while_the_node_reads(node, filled, fresh):
    engine = fresh(extra={"stall": 60.0, "max_wait": 60.0})
    node.settled()
    node.restart()
    node.slow.stall()
    engine.add("waits", filled, 3)
    engine.steps(3)
    assert engine.reset()
    engine.steps(3)
    node.slow.resume()
    engine.settle()
    assert not engine.told["waits"]
    node.settled()


# ------------------------------------------------------------------------------ loads between steps


def test_a_load_takes_a_piece_a_step(node, filled, fresh):
    engine = fresh(extra=ASYNC)
    engine.ask("busy", tokens(10, seed=2))
    engine.add("busy 2", tokens(10, seed=3), 30)
    engine.steps(2)
    engine.add("loads", filled, 4)
    steps = 0
    while not engine.answers["loads"]:
        engine.step()
        steps += 1
    assert steps == 7  # six blocks, and the step that computes the rest
    assert engine.told == {} or "loads" not in engine.told
    engine.settle()
    assert engine.told["loads"]["loaded_tokens"] == 96
    node.settled()


def test_loads_between_steps_of_several_requests(node, filled, fresh):
    engine = fresh(extra={"async_load_nbytes": 4096, "step_nbytes": 3 * 6144}, blocks=128)
    for n in range(4):
        engine.add(f"{n}", filled + tokens(30, seed=n), 4)
    engine.steps(3)
    engine.abort("1")
    engine.settle()
    assert set(engine.reasons.values()) == {"length"}
    node.settled()


@pytest.mark.parametrize("failing", range(6))
@pytest.mark.parametrize("abort", [False, True])
def test_a_load_between_steps_fails_in_the_middle(node, filled, fresh, failing, abort):
    engine = fresh(extra=ASYNC)
    copier = engine.workers[0].connector._worker._copier
    load, calls = copier.load, []

    def failing_load(blocks, arena):
        calls.append(blocks)
        if len(calls) == failing + 1:
            raise RuntimeError("the copy failed")
        load(blocks, arena)

    copier.load = failing_load
    engine.add("loads", filled, 4)
    engine.steps(failing + 1)
    if abort:
        engine.abort("loads")
    engine.settle()
    assert len(calls) == failing + 1
    if not abort:
        told = engine.told["loads"]
        assert told["outcome"] == "failed"
    assert engine.ask("again", filled, 4)
    engine.settle()
    node.settled()
    other = fresh()
    assert other.ask("other", filled, 4)["loaded_tokens"] == 96
    other.settle()
