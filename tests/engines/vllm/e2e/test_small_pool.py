"""A KV cache so small that requests are preempted, prefill in pieces, and loads between steps."""

import time

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(900)]

NUM_BLOCKS = 40
EXTRA = {
    "sync": {},
    "async": {"async_load_nbytes": "256KiB", "step_nbytes": "256KiB"},
}


@pytest.fixture(scope="module")
def node(make_node):
    return make_node()


@pytest.fixture(scope="module", params=EXTRA)
def engine(request, make_engine, node, reference):
    options = ("--num-gpu-blocks-override", NUM_BLOCKS, "--max-num-batched-tokens", 512)
    # Another tenant each, so that the second one begins cold.
    extra = EXTRA[request.param] | {"tenant": request.param}
    engine = make_engine(
        node, *options, "--max-model-len", 4096, "--max-num-seqs", 8, extra=extra
    ).wait_ready()
    yield engine
    assert engine.metrics()["headstart:hook_errors_total"] == 0
    engine.kill()


@pytest.mark.parametrize("length", [1, 128, 511, 512, 513, 1025, 4000])
def test_prefill_in_pieces(kit, node, engine, reference, length):
    prompt = kit.tokens(length, f"pieces {length}")
    assert reference.check(engine.ask(prompt), prompt).hit == 0
    engine.forget()
    answer = reference.check(engine.ask(prompt), prompt)
    assert answer.hit >= (length - 1) // kit.BLOCK * kit.BLOCK
    # Some of it at the engine, the rest loaded.
    engine.forget()
    engine.ask(prompt[: max(1, length // 2)])
    reference.check(engine.ask(prompt), prompt)
    node.idle()


def test_preempted_requests(kit, node, engine, reference):
    prompts = [kit.tokens(1400 + 20 * n, f"preempted {n}") for n in range(8)]
    before = engine.metrics()["vllm:num_preemptions_total"]
    for turn in ("cold", "warm", "again"):
        answers = kit.at_once(*(lambda p=p: engine.ask(p, 300) for p in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            reference.check(answer, prompt, 300)
        preempted = engine.metrics()["vllm:num_preemptions_total"] - before
        print(f"{turn}: {preempted:.0f} preemptions, hits {[a.hit for a in answers]}")
        engine.forget()
    assert preempted > 0
    assert min(answer.cached_tokens for answer in answers) > 0
    node.idle()


def test_clients_that_leave_while_their_prompt_is_loaded(kit, node, engine, reference):
    prompt = kit.tokens(3900, "left while loading")
    reference.check(engine.ask(prompt), prompt)
    for number in range(20):
        engine.forget()
        kit.at_once(*[lambda number=number: engine.ask_and_leave(prompt, number * 0.003)] * 2)
    node.idle()
    answer = reference.check(engine.ask(prompt), prompt)
    assert answer.cached_tokens >= 30 * kit.BLOCK
    assert engine.is_healthy()
    # No block is lost: a prompt of nearly all of them can run.
    engine.forget()
    longest = kit.tokens(4000, "longest")
    reference.check(engine.ask(longest), longest)


@pytest.mark.parametrize("fault", ["freeze", "kill", "restart"])
def test_a_node_that_fails_under_load(kit, node, engine, reference, fault):
    prompts = [kit.tokens(1500 + n, f"small pool {n % 8}") for n in range(16)]
    for prompt in prompts:
        engine.ask(prompt)
    node.written()
    with kit.Load(engine, prompts) as load:
        load.go_on(12)
        failed_at = time.monotonic()
        getattr(node, fault)()
        load.go_on(24)
        if fault == "freeze":
            node.thaw()
        elif fault == "kill":
            node.start()
        load.go_on(24)
    slowest = load.check(reference)
    after = max(answer.seconds for _, answer, asked in load.answers if asked > failed_at)
    print(f"{fault}: slowest answer {slowest:.2f} s, after the fault {after:.2f} s")
    assert engine.is_healthy()

    def is_back():
        engine.forget()
        return engine.ask(prompts[0]).hit

    kit.wait_for(is_back, "a hit", 60.0)
    node.idle()
