import json
import shlex
from importlib.util import find_spec

import pytest

from headstart.cli.main import main
from headstart.engines.vllm.command import headstart_arguments
from headstart.errors import ConfigError


def transfer(words):
    return json.loads(words[words.index("--kv-transfer-config") + 1])


def test_the_arguments_are_complete(tmp_path):
    words = headstart_arguments(["--port", "8001"], config=tmp_path / "h.toml")
    assert words[-2:] == ["--port", "8001"]
    assert "sha256_cbor" in words
    settings = transfer(words)
    assert settings["kv_connector"] == "HeadstartConnector"
    assert settings["kv_connector_extra_config"] == {
        "node": "auto",
        "config": str(tmp_path / "h.toml"),
    }


@pytest.mark.parametrize(
    "arguments", [["--prefix-caching-hash-algo", "xxhash"], ["--prefix_caching_hash_algo=sha256"]]
)
def test_a_hash_algorithm_of_the_user_stays(arguments):
    assert "sha256_cbor" not in headstart_arguments(arguments)


@pytest.mark.parametrize("arguments", [["--kv-transfer-config", "{}"], ["--kv_transfer_config={}"]])
def test_a_second_connector_is_refused(arguments):
    with pytest.raises(ConfigError, match="vllm serve"):
        headstart_arguments(arguments)


@pytest.mark.vllm
def test_dry_run_prints_what_a_shell_would_run(capsys):
    pytest.importorskip("vllm")
    arguments = ["--dry-run", "--node", "/run/n.sock", "--max-model-len", "4096"]
    with pytest.raises(SystemExit) as ended:
        main(["serve", "some/model", *arguments])
    assert not ended.value.code
    words = shlex.split(capsys.readouterr().out)
    assert "some/model" in words
    assert words[-2:] == ["--max-model-len", "4096"]
    assert transfer(words)["kv_connector_extra_config"]["node"] == "/run/n.sock"


def test_without_vllm_the_error_says_how_to_install_it(capsys):
    if find_spec("vllm") is not None:
        pytest.skip("vLLM is installed here")
    with pytest.raises(SystemExit) as ended:
        main(["serve", "m"])
    assert ended.value.code == 2
    assert "pip install" in capsys.readouterr().err
