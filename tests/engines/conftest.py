"""Tiny random models and stores for the engine's tests."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from headstart.config import Settings, open_store


def make_model(seed=0, *, dtype=torch.float32, **changes):
    """A random Llama with grouped-query attention: 3 layers, 2 KV heads, vocabulary of 300."""
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
    return model.to(dtype).eval()


def random_tokens(count, seed=0):
    """Random token ids of the tiny model's vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 299, (count,), generator=generator).tolist()


def plain_generate(model, tokens, max_new_tokens):
    """What the model answers by itself."""
    prompt = torch.tensor([tokens])
    output = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    return output[0, len(tokens) :].tolist()


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
            root = str(tmp_path / "store")
            tiers = [{"kind": "file", "root": root, "capacity": file, "durable": False}]
        settings = Settings.from_mapping({"memory": {"capacity": memory}, "tiers": tiers})
        opened.append(open_store(settings))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def store(make_store):
    return make_store()
