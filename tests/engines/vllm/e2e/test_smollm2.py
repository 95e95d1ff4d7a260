"""A model with trained weights, which answers questions on a real text."""

import time
from pathlib import Path

import pytest

from headstart.config import cache_dir
from headstart.engines.smollm2 import find_gguf, prepare_model
from headstart.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def smollm2():
    try:
        find_gguf()
    except ConfigError as error:
        pytest.skip(str(error))
    return prepare_model(cache_dir(), "float32")


def test_cold_memory_file_and_restarted(
    kit, smollm2, make_node, make_engine, make_reference, monkeypatch
):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    root = next(parent for parent in Path(__file__).parents if (parent / "README.md").exists())
    text = tokenizer.encode((root / "README.md").read_text())
    document = text.ids[:1400]
    questions = [
        document + tokenizer.encode(f"\n\nQuestion: {question}\nAnswer:").ids
        for question in ("What does a hit never do?", "How is it installed?")
    ]
    node = make_node(memory="512MiB", file="1GiB")
    reference = make_reference(smollm2)
    engine = make_engine(node, model=smollm2).wait_ready()
    hit = 1400 // kit.BLOCK * kit.BLOCK

    def ask(question, name):
        answer = reference.check(engine.ask(question, 32), question, 32)
        print(f"{name}: {answer.seconds:.2f} s, {answer.told}")
        return answer

    assert ask(questions[0], "cold").hit == 0
    engine.forget()
    assert ask(questions[1], "memory").told["loaded_tokens_by_tier"] == {"memory": hit}
    node.written().restart()
    deadline = time.monotonic() + 60.0
    while (answer := engine.ask(questions[0][:200])).told["outcome"] == "no node":
        assert time.monotonic() < deadline, answer
        engine.forget()
    engine.forget()
    assert ask(questions[1], "file").told["loaded_tokens_by_tier"].get("file", 0) >= hit - 128
    engine.restart()
    assert ask(questions[0], "engine restarted").hit >= hit
