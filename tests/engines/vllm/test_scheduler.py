"""What is hit, by whom, and with which bytes: vLLM's scheduler, the connector and a node."""

from __future__ import annotations

import pytest

from vllm_cases import BLOCK, tokens

pytest.importorskip("vllm")

# The warnings of vLLM's own imports are not ours to mend.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def test_wrong_bytes_are_seen(node, filled, fresh):
    """The tests below prove something: one flipped bit does not pass."""
    assert node.store.flush(20.0)
    for slab in range(0, node.memory.arena.nbytes, 4096):
        node.memory.view(slab, 4096)[100] ^= 1
    engine = fresh()
    with pytest.raises(AssertionError):
        engine.ask("read", filled, 4)
    assert engine.bad_reads


def test_a_prompt_is_hit_in_memory_and_after_a_restart_in_the_file(node, filled, fresh):
    engine = fresh()
    told = engine.ask("memory", filled, 4)
    assert told["loaded_tokens_by_tier"] == {"memory": 96}
    engine.settle()
    node.settled()
    node.restart()
    engine = fresh()
    told = engine.ask("file", filled, 4)
    assert told["loaded_tokens_by_tier"] == {"file": 96}
    assert (told["outcome"], told["local_tokens"], told["loaded_tokens"]) == ("hit", 0, 96)
    engine.settle()
    node.settled()


@pytest.mark.parametrize("extra", [{}, {"async_load_nbytes": 4096, "step_nbytes": 8192}])
@pytest.mark.parametrize("num_blocks", [1, 2, 6])
def test_a_full_hit_leaves_one_token_to_compute(node, fresh, num_blocks, extra):
    prompt = tokens(num_blocks * BLOCK)
    fresh().ask("fill", prompt)
    node.settled()
    engine = fresh(extra=extra)
    told = engine.ask("hit", prompt, 20)
    assert told["loaded_tokens"] == num_blocks * BLOCK - 1
    assert told["stored_blocks"] == 1  # of generated tokens
    engine.settle()
    node.settled()


@pytest.mark.parametrize("shared", [15, 16, 17, 47, 48, 96])
def test_the_shared_start_is_hit(node, filled, fresh, shared):
    engine = fresh()
    prompt = filled[:shared] + tokens(60, seed="other")
    told = engine.ask("part", prompt, 2)
    assert told.get("loaded_tokens", 0) == shared // BLOCK * BLOCK
    assert told["stored_blocks"] == len(prompt) // BLOCK - shared // BLOCK
    engine.settle()
    node.settled()


def test_a_local_hit_is_not_loaded_again(node, filled, fresh):
    engine = fresh()
    assert engine.ask("first", filled)["loaded_tokens"] == 96
    told = engine.ask("again", filled + tokens(40, seed=1))
    assert (told["outcome"], told["stored_blocks"]) == ("local", 2)
    # The engine's own blocks come first, the node's continue them.
    other = fresh()
    other.ask("short", filled[:50])
    told = other.ask("long", filled)
    assert (told["local_tokens"], told["loaded_tokens"]) == (48, 48)
    for each in (engine, other):
        each.settle()
    node.settled()


def test_a_local_hit_longer_than_the_nodes_is_stored_again(node, filled, fresh):
    engine = fresh()
    engine.ask("first", filled)
    node.settled()
    node.services.clear("")
    fresh().ask("other", filled[:50])  # now the node holds half of it
    node.settled()
    told = engine.ask("again", filled + tokens(40, seed=1), 20)
    assert (told["outcome"], told["held_tokens"]) == ("local", 48)
    assert told["stored_blocks"] == 159 // BLOCK - 3  # the last token is never computed
    engine.settle()
    node.settled()
    node.services.clear("")  # and now nothing
    engine.ask("once more", filled + tokens(40, seed=1), 20)
    engine.settle()
    node.settled()
    assert fresh().ask("replay", filled + tokens(40, seed=1))["loaded_tokens"] == 128
    node.settled()


def test_generated_text_is_hit_in_the_next_turn(node, fresh):
    engine = fresh(max_model_len=256)
    prompt, turns = tokens(40), []
    for turn in range(4):
        engine.ask(f"turn {turn}", prompt, 25)
        prompt = prompt + engine.answers[f"turn {turn}"] + tokens(9, seed=turn)
        turns.append(len(prompt) - 9 - 1)  # the KV of the last token was never computed
    engine.settle()
    node.settled()
    for turn in (3, 0, 1, 2):
        other = fresh(max_model_len=256)
        told = other.ask("replay", prompt[: turns[turn] + 10], 2)
        assert told["loaded_tokens"] == turns[turn] // BLOCK * BLOCK
        other.settle()
    node.settled()


@pytest.mark.parametrize("budget", [16, 24, 64])
def test_chunked_prefill_stores_every_block_once(node, fresh, budget):
    prompt = tokens(200)
    engine = fresh(max_num_batched_tokens=budget, max_model_len=256)
    assert engine.ask("cold", prompt, 20)["stored_blocks"] == 219 // BLOCK
    engine.settle()
    node.settled()
    other = fresh(max_num_batched_tokens=budget, max_model_len=256)
    told = other.ask("warm", prompt[:150] + tokens(50, seed=1), 4)
    assert told["loaded_tokens"] == 144
    other.settle()
    node.settled()


@pytest.mark.parametrize("extra", [{}, {"async_load_nbytes": 4096, "step_nbytes": 8192}])
@pytest.mark.parametrize("count", [2, 8])
def test_requests_that_share_a_prefix_arrive_at_once(node, fresh, count, extra):
    prompts = [tokens(100) + tokens(30, seed=n) for n in range(count)]
    for _ in range(2):  # cold, then warm
        engine = fresh(extra=extra, blocks=128)
        for n, prompt in enumerate(prompts):
            engine.add(f"{n}", prompt, 3)
        engine.settle()
        node.settled()
    assert sum(told.get("loaded_tokens", 0) for told in engine.told.values()) >= 128
    node.settled()
    node.restart()
    engine = fresh(extra=extra, blocks=128)
    for n, prompt in enumerate(prompts):
        engine.add(f"{n}", prompt, 3)
    engine.settle()
    assert all(told["outcome"] in ("hit", "local") for told in engine.told.values())
    node.settled()


def test_prompt_logprobs_read_no_cache_but_fill_it(node, fresh):
    engine, prompt = fresh(), tokens(100)
    assert engine.ask("probs", prompt, prompt_logprobs=1)["stored_blocks"] == 6
    told = engine.ask("again", prompt, prompt_logprobs=1)
    assert "loaded_tokens" not in told
    engine.settle()
    node.settled()
    other = fresh()
    assert "loaded_tokens" not in other.ask("probs", prompt, prompt_logprobs=1)
    assert fresh().ask("plain", prompt)["loaded_tokens"] == 96
    other.settle()
    node.settled()


def test_salts_never_cross(node, filled, fresh):
    engine = fresh()
    for salt in ("one", "two", None):
        told = engine.ask(f"salt {salt}", filled, 2, salt=salt)
        assert told.get("loaded_tokens", 0) == (0 if salt else 96)
    engine.settle()
    node.settled()
    other = fresh()
    for salt in (None, "two", "one", "three"):
        told = other.ask(f"salt {salt}", filled, 2, salt=salt)
        assert told.get("loaded_tokens", 0) == (0 if salt == "three" else 96)
    other.settle()
    node.settled()


@pytest.fixture
def adapter(tmp_path):
    """Makes requests for adapters, whose folders have weights of their own."""
    import torch
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    def make(number, name=None, **options):
        folder = tmp_path / f"adapter {number}"
        if not folder.exists():
            folder.mkdir()
            (folder / "adapter_config.json").write_text("{}")
            save_file({"a": torch.full((8,), number)}, folder / "adapter_model.safetensors")
        return LoRARequest(name or f"adapter {number}", number, str(folder), **options)

    return make


LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def test_adapters_never_cross(node, fresh, adapter):
    prompt = tokens(100)
    loaded = []
    for _ in range(2):
        engine = fresh(**LORA)
        for n in (None, 1, 2, 3):
            lora = adapter(n, "same name") if n else None
            loaded.append(engine.ask(f"{n}", prompt, 2, lora=lora).get("loaded_tokens", 0))
        engine.settle()
        node.settled()
    assert loaded == [0, 0, 0, 0, 96, 96, 96, 96]


def test_an_adapter_that_is_replaced_in_place_is_not_cached(node, fresh, adapter):
    """Its name, number and path stay the same while its weights change."""
    engine, prompt = fresh(**LORA), tokens(100)
    assert engine.ask("old", prompt, lora=adapter(1))["stored_blocks"] == 6
    engine.scheduler.reset_prefix_cache()
    told = engine.ask("new", prompt, lora=adapter(1, load_inplace=True))
    assert not told
    engine.settle()
    node.settled()


def test_a_prompt_that_goes_on_being_written_is_not_cached(node, filled, fresh):
    engine = fresh()
    engine.add("stream", filled + tokens(40, seed=1), resumable=True)
    engine.run(until=lambda: "STREAMING" in engine.requests["stream"].status.name)
    assert engine.answers["stream"]
    engine.abort("stream")
    engine.settle()
    node.settled()
    assert fresh().ask("after", filled + tokens(40, seed=1))["held_tokens"] == 96


@pytest.mark.parametrize("extra", [{}, {"async_load_nbytes": 4096, "step_nbytes": 4096}])
def test_a_memory_much_smaller_than_the_prompts(make_node, make_engine, extra):
    node = make_node(memory_blocks=4)
    prompts = [tokens(300, seed=n) for n in range(3)]

    def is_hit():
        """A generation may store nothing: memory is full of blocks that are not written yet."""
        engine = make_engine(node.path, extra=extra, blocks=128, max_model_len=512)
        for n, prompt in enumerate(prompts):
            engine.add(f"{n}", prompt, 4)
        engine.settle()
        node.settled()
        return any(told.get("loaded_tokens") for told in engine.told.values())

    assert any(is_hit() for _ in range(20))


@pytest.mark.parametrize("extra", [{}, {"async_load_nbytes": 4096, "step_nbytes": 8192}])
@pytest.mark.parametrize(("ranks", "overlap"), [(2, False), (1, True), (2, True)])
def test_ranks_and_overlapping_steps(node, fresh, ranks, overlap, extra):
    prompts = [tokens(100) + tokens(30, seed=n) for n in range(3)]
    options = {"ranks": ranks, "overlap": overlap, "extra": extra, "max_num_batched_tokens": 64}
    for _ in range(2):
        engine = fresh(**options)
        for n, prompt in enumerate(prompts):
            engine.add(f"{n}", prompt, 20)
        engine.settle()
        node.settled()
    assert sum(told.get("loaded_tokens", 0) for told in engine.told.values()) >= 3 * 32
    node.settled()
    node.restart()
    engine = fresh(**options)
    assert engine.ask("file", prompts[0], 20)["loaded_tokens"] == 128
    engine.settle()
    node.settled()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_prompt_in_many_steps_is_stored_whole(node, fresh, overlap):
    options = {"overlap": overlap, "max_num_batched_tokens": 32, "max_model_len": 512}
    engine, prompt = fresh(**options), tokens(480)
    assert engine.ask("cold", prompt, 8)["stored_blocks"] == 30
    engine.settle()
    node.settled()
    assert fresh(**options).ask("warm", prompt)["loaded_tokens"] == 479
    node.settled()


def test_other_engines_of_another_shape_have_blocks_of_their_own(node, filled, fresh):
    for options in ({"ranks": 2}, {"prefix_caching_hash_algo": "sha256"}, {"dtype": "float32"}):
        engine = fresh(**options)
        assert engine.ask("cold", filled).get("loaded_tokens", 0) == 0
        engine.settle()
    node.settled()
