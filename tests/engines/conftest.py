"""Tiny random models and stores for the engine's tests."""

from __future__ import annotations

from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from headstart.config import open_store
from headstart.settings import Settings

# What these modules import on their first lines.
_WITH_TORCH = [
    "test_never_a_hit.py",
    "test_real_model.py",
    "test_refused.py",
    "test_transformers.py",
]
collect_ignore = [] if find_spec("torch") and find_spec("transformers") else _WITH_TORCH


BLOCK = 16


def make_model(seed=0, *, dtype="float32", **changes):
    """A random Llama with grouped-query attention: 3 layers, 2 KV heads, vocabulary of 300."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        # Wide enough that the two best tokens are seldom close.
        "initializer_range": 0.2,
        "eos_token_id": 299,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**fields, **changes}))
    return model.to(getattr(torch, dtype)).eval()


def random_tokens(count, seed=0):
    """Random token ids of the tiny model's vocabulary."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 299, (count,), generator=generator).tolist()


def plain_generate(model, tokens, max_new_tokens):
    """What the model answers by itself."""
    import torch

    prompt = torch.tensor([tokens])
    output = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    return output[0, len(tokens) :].tolist()


@contextmanager
def last_logits(model):
    """A list to which every forward pass in the block appends the logits of its last token."""
    seen = []
    hook = model.register_forward_hook(
        lambda module, args, output: seen.append(output.logits[0, -1].float().clone())
    )
    try:
        yield seen
    finally:
        hook.remove()


@pytest.fixture(scope="session")
def tiny():
    """The functions above, which tests cannot import from here."""
    return SimpleNamespace(
        make_model=make_model,
        random_tokens=random_tokens,
        plain_generate=plain_generate,
        last_logits=last_logits,
    )


@pytest.fixture(scope="session")
def model():
    return make_model()


@pytest.fixture
def make_store(tmp_path):
    """Opens stores over one directory, one after another, and closes what is left open."""
    opened = []

    def make(*, memory="64MiB", file="128MiB"):
        tiers = []
        if file:
            tier = {"kind": "file", "root": str(tmp_path / "store"), "capacity": file}
            # Given, so that the device is not measured for every test.
            tiers = [{**tier, "durable": False, "inflight_nbytes": "4MiB", "threads": 4}]
        settings = Settings.from_mapping({"memory": {"capacity": memory}, "tiers": tiers})
        opened.append(open_store(settings))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def store(make_store):
    return make_store()


@pytest.fixture
def engine_for():
    """Makes an engine with small blocks and without a tokenizer."""
    from headstart.engines.transformers import CachedModel

    def make(model, store, **options):
        return CachedModel(model, None, store, **{"block_size": BLOCK, **options})

    return make


@pytest.fixture
def filled(model, store, engine_for):
    """A store that holds a prompt of six blocks of the model, and the prompt."""
    tokens = random_tokens(6 * BLOCK)
    for _ in range(2):
        answer = engine_for(model, store).generate(tokens, max_new_tokens=1)
    assert answer.hit_tokens == 6 * BLOCK - 1
    return store, tokens
