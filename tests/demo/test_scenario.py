"""The demo as a whole, on a tiny random model with the real model's tokenizer."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec

import pytest

from headstart.demo import restart, scenario
from headstart.demo.session import NUM_ANSWERS, SessionOptions
from headstart.errors import HeadstartError


def _make_model(folder, tokenizer_from):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shutil.copytree(tokenizer_from, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    fields = json.loads((tokenizer_from / "config.json").read_text())
    small = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 64, "head_dim": 16}
    fields.update(small, num_attention_heads=3, num_key_value_heads=1, initializer_range=0.2)
    LlamaForCausalLM(LlamaConfig(**fields)).save_pretrained(folder)


@pytest.fixture(scope="module")
def tiny_model_dir(tmp_path_factory):
    if find_spec("torch") is None:
        pytest.skip("not installed: torch")
    from headstart import config
    from headstart.engines.smollm2 import prepare_model

    folder = tmp_path_factory.mktemp("model") / "tiny"
    _make_model(folder, prepare_model(config.cache_dir(), "float32"))
    return folder


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_all_phases_give_the_same_answers(tiny_model_dir, tmp_path):
    seen = []
    result = scenario.run_demo(
        scenario.DemoOptions(
            model_dir=tiny_model_dir,
            root=tmp_path,
            max_new_tokens=12,
            memory_nbytes=64 << 20,
            file_nbytes=64 << 20,
        ),
        lambda *step: seen.append(step),
    )
    assert result.identical
    assert [phase.name for phase in result.phases] == ["recompute", "cold", "memory", "restart"]
    by_name = {phase.name: phase for phase in result.phases}
    assert by_name["recompute"].first.prompt_tokens >= 5500
    assert by_name["recompute"].first.hit_tokens == by_name["cold"].first.hit_tokens == 0
    assert by_name["memory"].first.hit_tokens >= 5472
    assert by_name["restart"].first.tokens_from == {
        "file": by_name["memory"].first.tokens_from["memory"]
    }
    assert by_name["cold"].answers[1].hit_tokens > 5000
    # A later turn of the chat finds the answer of the one before.
    assert by_name["cold"].answers[7].hit_tokens > by_name["cold"].answers[6].prompt_tokens - 32
    steps = [(step, total) for _, step, total, _ in seen]
    assert steps == sorted(steps)
    assert steps[-1] == (4 * NUM_ANSWERS, 4 * NUM_ANSWERS)
    assert list(tmp_path.iterdir()) == []
    json.loads(result.dumps())


def test_a_child_that_fails_says_why(tmp_path):
    options = SessionOptions(model_dir=tmp_path / "nothing")
    settings = {"tiers": [{"kind": "nothing"}]}
    with pytest.raises(HeadstartError, match="exit code 1"):
        restart.run_in_new_process(options, settings, tmp_path, lambda step: None)


def test_a_silent_child_is_given_up(monkeypatch):
    monkeypatch.setattr(restart, "SILENCE_S", 0.3)
    monkeypatch.setattr(restart, "_command", lambda: ["sleep", "60"])
    with pytest.raises(HeadstartError, match="silent"):
        list(restart._talk("{}"))
