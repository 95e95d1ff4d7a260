import pytest

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BLOCK = 16


def tokens(count, start=1):
    return [1 + (start * 7 + n * n % 41 + n) % 60 for n in range(count)]


def test_cold_memory_file(node, make_engine):
    engine = make_engine(node.path)
    prompt = tokens(100)
    told = engine.ask("cold", prompt, 4)
    print(told)
    engine.settle()
    node.settled()
    other = make_engine(node.path)
    told = other.ask("memory", prompt, 4)
    print(told)
    other.settle()
    node.restart()
    third = make_engine(node.path)
    told = third.ask("file", prompt, 4)
    print(told)
    third.settle()
    node.settled()
