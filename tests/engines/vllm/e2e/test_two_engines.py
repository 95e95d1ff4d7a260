"""Two engines on one node: what they share, and what they must not."""

import os
import shutil
import signal

import numpy
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def node(make_node):
    return make_node()


@pytest.fixture(scope="module")
def engines(make_engine, node, reference):
    made = [make_engine(node), make_engine(node)]
    return [engine.wait_ready() for engine in made]


def test_a_prefix_is_shared(kit, node, engines, reference):
    one, other = engines
    prompt = kit.tokens(2000, "two")
    assert reference.check(one.ask(prompt), prompt).hit == 0
    assert reference.check(other.ask(prompt), prompt).hit == 15 * kit.BLOCK
    # The same at the same time, cold: one stores, the other finds it stored, or neither waits.
    for number in range(4):
        both = kit.tokens(1500, f"both {number}")
        for answer in kit.at_once(lambda p=both: one.ask(p), lambda p=both: other.ask(p)):
            reference.check(answer, both)
        for engine in engines:
            engine.forget()
            assert reference.check(engine.ask(both), both).hit == 11 * kit.BLOCK
    assert node.gauges()["engines"] == 2
    node.idle()


def test_a_frozen_engine_keeps_what_it_holds_and_nothing_else(kit, node, engines, reference):
    one, other = engines
    prompts = [kit.tokens(1500, f"frozen {n}") for n in range(8)]
    for prompt in prompts:
        one.ask(prompt)
    one.forget()
    with kit.Load(one, prompts) as load:
        load.go_on(4)
        one.process.send(signal.SIGSTOP)
        for prompt in prompts:
            other.forget()
            assert reference.check(other.ask(prompt), prompt).hit
        one.process.send(signal.SIGCONT)
        load.go_on(8)
    load.check(reference)
    node.idle()


def test_a_reset_is_for_one_engine(kit, node, engines, reference):
    one, other = engines
    prompt = kit.tokens(1500, "reset one")
    one.ask(prompt)
    one.forget(external=True)
    assert reference.check(one.ask(prompt), prompt).cached_tokens == 0
    assert reference.check(other.ask(prompt), prompt).hit == 11 * kit.BLOCK


def test_a_killed_engine_leaves_the_other_alone(kit, node, engines, reference):
    one, other = engines
    prompts = [kit.tokens(1500, f"killed {n}") for n in range(8)]
    for prompt in prompts:
        other.ask(prompt)
    with kit.Load(other, prompts, streams=2) as load:
        with kit.Load(one, prompts, may_fail=True) as dying:
            dying.go_on(4)
            one.kill()
        kit.wait_for(lambda: node.gauges()["engines"] == 1, "the end of a session")
        load.go_on(8)
    load.check(reference)
    node.idle()
    assert node.gauges()["workers"] == 1


def test_changed_weights_are_another_model(
    kit, node, model, make_engine, make_reference, reference, tmp_path_factory
):
    """Not even where the file's time and size stay, and it is the same path."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path_factory.mktemp("changed") / "tiny"
    shutil.copytree(model, folder)
    path = folder / "model.safetensors"
    engine = make_engine(node, model=folder).wait_ready()
    prompt = kit.tokens(1000, "weights")
    reference.check(engine.ask(prompt), prompt)
    engine.restart()
    assert reference.check(engine.ask(prompt), prompt).hit == 7 * kit.BLOCK
    engine.stop()
    before = path.stat()
    tensors = load_file(path)
    name = "model.layers.0.self_attn.v_proj.weight"
    tensors[name] = (tensors[name] * numpy.float32(1.5)).copy()
    save_file(tensors, path, {"format": "pt"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    engine.start()
    changed = make_reference(folder)
    answer = changed.check(engine.wait_ready().ask(prompt), prompt)
    assert answer.cached_tokens == 0
    with pytest.raises(AssertionError):
        reference.check(answer, prompt)
    engine.forget()
    assert changed.check(engine.ask(prompt), prompt).hit == 7 * kit.BLOCK
    engine.kill()
