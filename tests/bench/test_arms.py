"""What an arm may be, and the commands that come of it."""

import json
from pathlib import Path

import pytest

from headstart.bench import arms as module
from headstart.bench.arms import Vllm, parse_arms
from headstart.errors import ConfigError

MODEL = Vllm(model="a model", words=("--max-model-len", "8192"))
SERVER = "python server.py --port {port} --name 'two words'"


@pytest.fixture(autouse=True)
def _vllm(monkeypatch):
    """As where vLLM is installed: where it is not, that is what is said first."""
    monkeypatch.setattr(module, "server_words", lambda model: ["vllm", "serve", model])


def command(text, common=MODEL):
    (arm,) = parse_arms([text], common)
    return arm, " ".join(arm.command(81, Path("/run/n.sock")))


@pytest.mark.parametrize(
    ("what", "words", "has_cache"),
    [
        ("none", "--no-enable-prefix-caching", False),
        ("gpu-prefix", "--enable-prefix-caching", True),
        ('{"kv_connector": "Other"}', '--kv-transfer-config {"kv_connector": "Other"}', True),
    ],
)
def test_arms_of_vllm_differ_in_their_caches_only(what, words, has_cache):
    arm, line = command(f"a={what}")
    assert line.startswith("vllm serve a model --host 127.0.0.1 --port 81 ")
    assert words in line
    assert line.endswith("--max-model-len 8192")
    assert (arm.name, arm.has_prefix_cache, arm.has_node) == ("a", has_cache, False)
    assert line.count("--enable-prompt-tokens-details") == 1


def test_headstart_has_a_node_of_its_own():
    arm, _ = command("ours=headstart")
    words = arm.command(81, Path("/run/n.sock"))
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "HeadstartConnector"
    assert transfer["kv_connector_extra_config"] == {"node": "/run/n.sock"}
    assert (arm.has_node, arm.has_prefix_cache) == (True, True)
    mine, line = command('mine={"kv_connector_extra_config": {"node": "{socket}"}}')
    assert (mine.has_node, '{"node": "/run/n.sock"}' in line) == (True, True)


def test_what_the_user_says_is_not_said_twice():
    _, line = command("a=none", Vllm(model="m", words=("--enable-prompt-tokens-details",)))
    assert line.count("--enable-prompt-tokens-details") == 1


def test_any_servers_command_is_an_arm():
    (arm,) = parse_arms([f"a = {SERVER}".replace(" = ", "=")], Vllm(), has_prefix_cache=True)
    assert arm.command(81, None) == ["python", "server.py", "--port", "81", "--name", "two words"]
    assert (arm.has_node, arm.has_prefix_cache) == (False, True)
    (arm,) = parse_arms(["b=x --listen=:{port} --node {socket}"], Vllm())
    assert arm.command(81, Path("/s")) == ["x", "--listen=:81", "--node", "/s"]
    assert (arm.has_node, arm.has_prefix_cache) == (True, None)


@pytest.mark.parametrize(
    ("texts", "common", "message"),
    [
        (["a=headstart"], Vllm(), "name the model to serve with --serve-model"),
        (["a={}"], Vllm(), "name the model to serve"),
        (["a={no"], MODEL, "is not JSON"),
        (["a=gpu_prefix"], MODEL, "is none of none, gpu-prefix, headstart and {...}, and as"),
        (["a=server --port 8000"], Vllm(), "must say {port}"),
        (["a=server '{port}"], Vllm(), "cannot be split: No closing quotation"),
        (["a="], MODEL, "'' is none of"),
        (["a b=none"], MODEL, "the name 'a b' must be letters, digits"),
        (["../x=none"], MODEL, "the name '../x' must be"),
        (["-a=none"], MODEL, "begin with a letter or digit"),
        (["a\x1b[31m=none"], MODEL, "must be letters, digits"),
        (["=none"], MODEL, "the name '' must be"),
        ([f"{'a' * 61}=none"], MODEL, "at most 60"),
        (["a=none", "b=gpu-prefix", "a=headstart"], MODEL, "--arm a is there twice"),
        ([f"a={SERVER}"], MODEL, "a command has all its words already"),
        ([], Vllm(words=("stray",)), "--serve-model and what follows a lone --"),
        (["a=none"], Vllm(model="m", words=("--port=1",)), "--port is what the arms set"),
        (["a=none"], Vllm(model="m", words=("--kv_transfer_config", "{}")), "--kv-transfer-config"),
    ],
)
def test_what_is_no_arm_is_refused(texts, common, message):
    with pytest.raises(ConfigError) as refused:
        parse_arms(texts, common)
    assert message in str(refused.value)


def test_vllm_has_to_be_installed(monkeypatch):
    from headstart.engines.vllm import command

    monkeypatch.setattr(module, "server_words", command.server_words)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        parse_arms(["a=none"], MODEL)
