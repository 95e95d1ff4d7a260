"""Everything that may happen, at random, for minutes; every answer is the reference's."""

import random
import time

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(1800)]

SECONDS = 120.0
BOUND_S = 30.0
"""No answer takes longer: eight streams recompute on one core, preempted again and again."""


@pytest.mark.parametrize("seed", [1, 2])
def test_chaos(kit, make_node, make_engine, reference, seed):
    chance = random.Random(seed)
    node = make_node(memory="16MiB", file="64MiB")
    engine = make_engine(
        node,
        *("--num-gpu-blocks-override", 60, "--max-num-batched-tokens", 512),
        *("--max-model-len", 4096, "--max-num-seqs", 8),
        extra={"async_load_nbytes": "1MiB", "step_nbytes": "512KiB"},
    ).wait_ready()
    shared = [kit.tokens(chance.randrange(100, 1500), f"chaos {seed} {n}") for n in range(8)]
    prompts = [
        chance.choice(shared) + kit.tokens(chance.randrange(1, 1200), f"tail {seed} {n}")
        for n in range(60)
    ]

    def freeze():
        node.freeze()
        time.sleep(chance.uniform(0.1, 4.0))
        node.thaw()

    def kill():
        node.kill()
        time.sleep(chance.uniform(0.0, 3.0))
        node.start()

    def restart():
        node.restart()

    def leave():
        prompt, after_s = chance.choice(prompts), chance.uniform(0.0, 0.2)
        kit.at_once(*[lambda: engine.ask_and_leave(prompt, after_s)] * 4)

    def reset():
        engine.post("/reset_prefix_cache?reset_external=true")

    faults = [freeze, freeze, kill, restart, leave, leave, leave, reset]
    counts = dict.fromkeys((fault.__name__ for fault in faults), 0)
    started = time.monotonic()
    with kit.Load(engine, prompts, max_tokens=40) as load:
        while time.monotonic() - started < SECONDS:
            load.go_on(chance.randrange(4, 30), 120.0)
            fault = chance.choice(faults)
            counts[fault.__name__] += 1
            fault()
    slowest = load.check(reference)
    hits = sum(answer.hit > 0 for _, answer, _ in load.answers)
    metrics = engine.metrics()
    told = {
        name: metrics[f"headstart:{name}_total"]
        for name in ("hits", "loads_late", "loads_failed", "stores_failed", "hook_errors")
    }
    preemptions = metrics["vllm:num_preemptions_total"]
    print(
        f"{len(load.answers)} answers, {hits} hits, slowest {slowest:.2f} s, "
        f"{preemptions:.0f} preemptions, {counts}, {told}"
    )
    assert slowest < BOUND_S
    assert told["hook_errors"] == 0
    assert hits > 0
    assert engine.is_healthy()
    node.idle()
    engine.kill()
