"""Two tensor-parallel ranks: a block consists of a shard of each."""

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(1800)]

OPTIONS = ("--tensor-parallel-size", 2)
ENV = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def node(make_node):
    return make_node()


@pytest.fixture(scope="module")
def reference(make_reference, model):
    """Answers of two ranks without a cache."""
    made = make_reference(model, *OPTIONS, env=ENV)
    made.ask([1])  # two ranks spin while they wait: one engine after the other
    return made


@pytest.fixture(scope="module")
def engine(make_engine, node, reference):
    return make_engine(node, *OPTIONS, env=ENV).wait_ready()


@pytest.mark.parametrize("length", [128, 129, 1000, 4000])
def test_cold_then_from_memory(kit, node, engine, reference, length):
    prompt = kit.tokens(length, f"ranks {length}")
    assert reference.check(engine.ask(prompt), prompt).hit == 0
    engine.forget()
    answer = reference.check(engine.ask(prompt), prompt)
    assert answer.hit == min(length // kit.BLOCK * kit.BLOCK, length - 1)
    assert node.gauges()["workers"] == 2
    node.idle()


def test_eight_at_once(kit, node, engine, reference):
    start = kit.tokens(6 * kit.BLOCK, "shared by ranks")
    asked = [start + kit.tokens(100 + n, f"rank tail {n}") for n in range(8)]
    for wanted in (0, 6 * kit.BLOCK):
        engine.forget()
        answers = kit.at_once(*(lambda prompt=prompt: engine.ask(prompt) for prompt in asked))
        for prompt, answer in zip(asked, answers, strict=True):
            reference.check(answer, prompt)
        assert min(answer.cached_tokens for answer in answers) >= wanted
    node.idle()


def test_restarts(kit, node, engine, reference):
    prompt = kit.tokens(3000, "restarted ranks")
    engine.ask(prompt)
    node.written().restart()

    def is_back():
        engine.forget()
        return engine.ask(kit.tokens(1000, "ranks 1000")).hit

    kit.wait_for(is_back, "a hit", 60.0)
    answer = reference.check(engine.ask(prompt), prompt)
    assert answer.cached_tokens == 23 * kit.BLOCK
    engine.restart()
    answer = reference.check(engine.ask(prompt), prompt)
    assert answer.hit == 23 * kit.BLOCK
    engine.kill()
    kit.wait_for(lambda: not node.gauges()["sessions"], "the end of the session")
    node.idle()
