"""What must never be a hit: other weights, dtypes, layouts, tenants, configurations, kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headstart.engines.fingerprint import weights_fingerprint

BLOCK = 16


@pytest.fixture
def hit_of(engine_for):
    """How many tokens of a prompt another engine finds."""

    def find(model, store, tokens, **options):
        engine = engine_for(model, store, **options)
        return engine.generate(tokens, max_new_tokens=1).hit_tokens

    return find


def test_other_weights_never_hit(filled, tiny, hit_of):
    store, tokens = filled
    assert hit_of(tiny.make_model(seed=1), store, tokens) == 0


def test_another_dtype_never_hits(filled, tiny, hit_of):
    store, tokens = filled
    assert hit_of(tiny.make_model(dtype="bfloat16"), store, tokens) == 0


@pytest.mark.parametrize("options", [{"block_size": 32}, {"tenant": "other"}])
def test_another_layout_or_tenant_never_hits(model, filled, options, hit_of):
    store, tokens = filled
    assert hit_of(model, store, tokens, **options) == 0


@pytest.mark.parametrize(
    "changes",
    [{"rms_norm_eps": 1e-3}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}],
)
def test_another_configuration_never_hits(filled, changes, tiny, hit_of):
    store, tokens = filled
    assert hit_of(tiny.make_model(**changes), store, tokens) == 0


def test_another_attention_implementation_never_hits(filled, tiny, hit_of):
    store, tokens = filled
    model = tiny.make_model()
    model.set_attn_implementation("eager")
    assert hit_of(model, store, tokens) == 0


def _train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()


def _edit_one_element(model):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1


def _bypass_the_version_counter(model):
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.001)


def _replace(model):
    norm = model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach() * 2)


def _load_state(model):
    model.load_state_dict({name: value + 0.01 for name, value in model.state_dict().items()})


@pytest.mark.parametrize(
    "change", [_train, _edit_one_element, _bypass_the_version_counter, _replace, _load_state]
)
def test_weights_changed_in_place_never_hit(store, change, engine_for, tiny):
    model = tiny.make_model()
    tokens = tiny.random_tokens(6 * BLOCK)
    engine = engine_for(model, store)
    engine.generate(tokens, max_new_tokens=1)
    change(model)
    answer = engine.generate(tokens, max_new_tokens=4)
    assert answer.hit_tokens == 0
    assert list(answer.tokens) == tiny.plain_generate(model, tokens, 4)
    assert engine.generate(tokens, max_new_tokens=1).hit_tokens == 6 * BLOCK - 1


def test_every_tensor_is_in_the_fingerprint(tiny):
    before = weights_fingerprint(tiny.make_model())
    names = [name for name, _ in tiny.make_model().named_parameters()]
    names += [name for name, _ in tiny.make_model().named_buffers()]
    for name in names:
        model = tiny.make_model()
        tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]
        tensor.data.mul_(1.01)
        assert weights_fingerprint(model) != before, name


def test_the_fingerprint_is_the_same_in_another_process(tiny):
    folder = Path(__file__).parent
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        "from conftest import make_model\n"
        "from headstart.engines.fingerprint import weights_fingerprint\n"
        "print(weights_fingerprint(make_model()))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert output.stdout.strip() == weights_fingerprint(tiny.make_model())
