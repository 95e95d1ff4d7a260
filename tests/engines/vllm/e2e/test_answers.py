"""One engine, one node, and everything that may happen to them without a change of settings.

This module is the part of the end-to-end tests that runs on every commit: three starts of an engine
in all. The other modules of this folder are marked `soak`:

    test_small_pool      prefill in pieces, preemption, loads between steps
    test_two_engines     one node for two engines; changed weights; a killed engine
    test_start           what is refused at start; `node: auto`
    test_parallel        two tensor-parallel ranks
    test_smollm2         a model with trained weights
    test_chaos           all of it at once, at random
"""

import os
import time

import pytest

# An engine starts in half a minute on a machine that is idle, and in minutes on one that is not.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LENGTHS = (1, 127, 128, 129, 255, 256, 1000, 2048, 8000)
MARGIN_S = 5.0
"""The product promises 1 s over recomputing; the machines of these tests are busy."""


@pytest.fixture(scope="module")
def node(make_node):
    return make_node()


@pytest.fixture(scope="module", autouse=True)
def starting(make_engine, node, reference):
    """The engine, which starts while the reference does."""
    return make_engine(node)


@pytest.fixture(scope="module")
def engine(starting):
    return starting.wait_ready()


@pytest.fixture(scope="module")
def prompts(kit):
    """Prompts for load, half of each shared with three others."""
    shared = [kit.tokens(8 * kit.BLOCK, f"load {n}") for n in range(6)]
    return [shared[n % 6] + kit.tokens(7 * kit.BLOCK + n + 1, f"load tail {n}") for n in range(24)]


def ask_again(kit, engine, prompt):
    """Ask what the engine itself has forgotten."""
    engine.forget()
    return engine.ask(prompt)


def is_back(kit, engine, prompt):
    """Wait until the engine uses the node again."""
    kit.wait_for(lambda: ask_again(kit, engine, prompt).hit, "a hit", 60.0)


def test_the_reference_depends_on_all_of_a_prompt(kit, reference):
    prompt = kit.tokens(8000, "sensitive")
    for place in (0, 100, 4000, 7900):
        other = list(prompt)
        other[place] = 1 + other[place] % 900
        answer = reference.ask(other)
        with pytest.raises(AssertionError):
            reference.check(answer, prompt)


@pytest.mark.parametrize("length", LENGTHS)
def test_cold_then_from_memory(kit, node, engine, reference, length):
    prompt = kit.tokens(length, f"cold {length}")
    cold = reference.check(engine.ask(prompt), prompt)
    assert cold.hit == 0
    assert cold.told["outcome"] == "miss"
    warm = reference.check(ask_again(kit, engine, prompt), prompt)
    # The last token of a prompt is always computed.
    assert warm.hit == min(length // kit.BLOCK * kit.BLOCK, length - 1)
    assert warm.cached_tokens == warm.hit
    if warm.hit:
        assert warm.told["loaded_tokens_by_tier"] == {"memory": warm.hit}
    node.idle()


def test_a_hit_is_told_to_the_client_and_counted(kit, node, engine, reference):
    prompt = kit.tokens(700, "told")
    engine.ask(prompt)
    before = engine.metrics()
    warm = reference.check(ask_again(kit, engine, prompt), prompt)
    assert {name: warm.told[name] for name in ("prompt_tokens", "held_tokens", "outcome")} == {
        "prompt_tokens": 700,
        "held_tokens": 640,
        "outcome": "hit",
    }
    kit.wait_for(lambda: engine.metrics()["headstart:hits_total"] > before["headstart:hits_total"])
    after = engine.metrics()
    assert after["headstart:loaded_tokens_total"] - before["headstart:loaded_tokens_total"] == 640
    assert after["headstart:load_bytes_total"] - before["headstart:load_bytes_total"] == 5 << 17
    assert after["vllm:external_prefix_cache_hits_total"] >= 640
    assert after["headstart:hook_errors_total"] == 0
    assert node.metrics()["headstart_tier_hits_total"] >= 5


@pytest.mark.parametrize("num_local", [0, 1, 3])
def test_what_the_engine_has_is_not_loaded(kit, engine, reference, num_local):
    """A prefix of four blocks is held by the node, a part of it by the engine."""
    start = kit.tokens(4 * kit.BLOCK, f"partial {num_local}")
    engine.ask(start + kit.tokens(10, "a"))
    engine.forget()
    if num_local:
        engine.ask(start[: num_local * kit.BLOCK] + kit.tokens(50, "b"))
    prompt = start + kit.tokens(300, "c")
    answer = reference.check(engine.ask(prompt), prompt)
    assert answer.hit == (4 - num_local) * kit.BLOCK
    assert answer.cached_tokens == 4 * kit.BLOCK


def test_an_answer_is_hit_in_the_next_turn(kit, node, engine, reference):
    prompt = kit.tokens(200, "turn")
    answer = reference.check(engine.ask(prompt, 200), prompt, 200)
    # The last generated token is not computed.
    turn = prompt + answer.token_ids + kit.tokens(60, "turn 2")
    second = reference.check(ask_again(kit, engine, turn), turn)
    assert second.hit == 399 // kit.BLOCK * kit.BLOCK
    node.idle()


def test_eight_at_once_share_a_prefix(kit, node, engine, reference):
    start = kit.tokens(6 * kit.BLOCK, "shared")
    asked = [start + kit.tokens(100 + n, f"tail {n}") for n in range(8)]
    for wanted in (0, 6 * kit.BLOCK):
        engine.forget()
        answers = kit.at_once(*(lambda prompt=prompt: engine.ask(prompt) for prompt in asked))
        for prompt, answer in zip(asked, answers, strict=True):
            reference.check(answer, prompt)
        hits = [answer.cached_tokens for answer in answers]
        assert min(hits) >= wanted, hits
    node.idle()


def test_a_salt_is_never_crossed(kit, engine, reference):
    prompt = kit.tokens(600, "salted")
    for salt in ("one", "two"):
        assert engine.ask(prompt, cache_salt=salt).cached_tokens == 0
    engine.forget()
    assert reference.check(engine.ask(prompt), prompt).cached_tokens == 0
    for salt in ("one", "two"):
        engine.forget()
        answer = reference.check(engine.ask(prompt, cache_salt=salt), prompt)
        assert answer.hit == 4 * kit.BLOCK
    engine.forget()
    assert engine.ask(prompt, cache_salt="three").cached_tokens == 0


def test_a_request_for_logprobs_of_its_prompt_loads_nothing(kit, engine, reference):
    """It needs every token computed."""
    prompt = kit.tokens(600, "prompt logprobs")
    engine.ask(prompt)
    engine.forget()
    assert reference.check(engine.ask(prompt, prompt_logprobs=1), prompt).cached_tokens == 0
    assert reference.check(ask_again(kit, engine, prompt), prompt).hit == 4 * kit.BLOCK


def test_clients_that_leave(kit, node, engine, reference):
    """At several moments of a cold and of a warm request, alone and beside others."""
    prompt = kit.tokens(6000, "left")
    for after_s in (0.0, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0):
        engine.ask_and_leave(kit.tokens(6000, f"left {after_s}"), after_s)
    reference.check(engine.ask(prompt), prompt)
    for after_s in (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.2):
        engine.forget()
        kit.at_once(*[lambda after_s=after_s: engine.ask_and_leave(prompt, after_s)] * 3)
    assert engine.is_healthy()
    node.idle()
    answer = reference.check(ask_again(kit, engine, prompt), prompt)
    assert answer.hit == 46 * kit.BLOCK


def test_a_restarted_node_reads_its_files(kit, node, engine, reference):
    asked = [kit.tokens(length, f"kept {length}") for length in (128, 1500, 8000)]
    for prompt in asked:
        engine.ask(prompt)
    node.written().restart()
    is_back(kit, engine, asked[0])
    for prompt in asked[1:]:
        answer = reference.check(ask_again(kit, engine, prompt), prompt)
        assert answer.told["loaded_tokens_by_tier"] == {"file": len(prompt) // 128 * 128}
        print(f"file hit of {answer.hit} tokens: {answer.seconds:.3f} s, {answer.told}")
        again = reference.check(ask_again(kit, engine, prompt), prompt)
        assert again.told["loaded_tokens_by_tier"] == {"memory": len(prompt) // 128 * 128}
    node.idle()


@pytest.mark.parametrize("fault", ["freeze", "kill", "restart"])
def test_a_node_that_fails_under_load(kit, node, engine, reference, prompts, fault):
    if fault == "freeze":
        with kit.Load(engine, prompts) as cold:  # stores them, too
            cold.go_on(len(prompts))
        recompute_s = cold.check(reference)
        print(f"slowest answer cold {recompute_s:.2f} s")
    else:
        recompute_s = max(reference.ask(prompt).seconds for prompt in prompts) * 8
    is_back(kit, engine, prompts[0])
    node.written()
    engine.forget()
    with kit.Load(engine, prompts) as load:
        load.go_on(4)
        failed_at = time.monotonic()
        getattr(node, fault)()
        load.go_on(len(prompts))
    slowest = load.check(reference)
    num_hits = sum(answer.hit > 0 for _, answer, _ in load.answers)
    print(f"{fault}: slowest answer {slowest:.2f} s, of {len(load.answers)}; {num_hits} hits")
    after = [answer.seconds for _, answer, asked in load.answers if asked > failed_at]
    assert max(after) < recompute_s + MARGIN_S
    engine.forget()
    started = time.monotonic()
    prompt = kit.tokens(1000, f"without node {fault}")
    reference.check(engine.ask(prompt), prompt)
    print(f"{fault}: then alone {time.monotonic() - started:.2f} s")
    if fault == "freeze":
        node.thaw()
    elif fault == "kill":
        node.start()
    is_back(kit, engine, prompts[0])
    with kit.Load(engine, prompts) as load:
        load.go_on(len(prompts))
    load.check(reference)
    assert engine.is_healthy()
    node.idle()


def test_damaged_bytes_are_never_loaded(kit, node, engine, reference):
    asked = [kit.tokens(length, f"damaged {length}") for length in (300, 1500, 3000)]
    for prompt in asked:
        engine.ask(prompt)
    node.written().stop()
    for slab in sorted((node.root / "slabs").glob("*.slab")):
        with slab.open("r+b") as file:
            for place in range(5000, os.fstat(file.fileno()).st_size, 1 << 16):
                byte = os.pread(file.fileno(), 1, place)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 0x10]), place)
    node.start()
    other = kit.tokens(400, "undamaged")

    def is_used():
        engine.forget()
        return engine.ask(other).told["outcome"] != "no node"

    kit.wait_for(is_used, "the node's use", 60.0)
    for prompt in asked:
        answer = reference.check(ask_again(kit, engine, prompt), prompt)
        assert answer.hit == 0
    assert node.metrics()['headstart_tier_dropped_total{tier="file"}'] > 0
    for prompt in asked:
        is_back(kit, engine, prompt)  # a busy node may have refused to store it at first
        answer = reference.check(ask_again(kit, engine, prompt), prompt)
        assert answer.hit == len(prompt) // kit.BLOCK * kit.BLOCK
    node.idle()


def test_a_killed_engine_leaves_nothing_behind_and_is_warm_again(
    kit, node, engine, reference, prompts
):
    is_back(kit, engine, prompts[0])
    engine.forget()
    with kit.Load(engine, prompts, may_fail=True) as load:
        load.go_on(6)
        engine.kill()
    kit.wait_for(lambda: not node.gauges()["sessions"], f"an end of {node.gauges()}")
    node.idle()
    assert node.gauges()["workers"] == 0
    engine.start()
    engine.wait_ready()
    for prompt in prompts[:3]:
        answer = reference.check(engine.ask(prompt), prompt)
        assert answer.cached_tokens == len(prompt) // kit.BLOCK * kit.BLOCK
    answer = engine.ask(prompts[3])
    assert answer.told["loaded_tokens_by_tier"].keys() <= {"memory", "file"}
    assert engine.metrics()["headstart:hook_errors_total"] == 0


def test_a_reset_covers_all_tiers(kit, node, engine, reference):
    prompt = kit.tokens(1000, "reset")
    engine.ask(prompt)
    assert ask_again(kit, engine, prompt).hit
    engine.forget(external=True)
    answer = reference.check(engine.ask(prompt), prompt)
    assert answer.cached_tokens == 0
    answer = reference.check(ask_again(kit, engine, prompt), prompt)
    assert answer.hit == 7 * kit.BLOCK  # stored anew
    node.idle()
