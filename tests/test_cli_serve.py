import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from headstart.cli.main import main
from headstart.cli.serve import vllm_command
from headstart.errors import ConfigError


def transfer(command):
    return json.loads(command[command.index("--kv-transfer-config") + 1])


def test_the_command_is_complete(tmp_path):
    command = vllm_command("org/model", ["--port", "8001"], node="auto", config=tmp_path / "h.toml")
    assert command[:3] == ["vllm", "serve", "org/model"]
    assert command[-2:] == ["--port", "8001"]
    assert "sha256_cbor" in command
    settings = transfer(command)
    assert settings["kv_connector"] == "HeadstartConnector"
    assert settings["kv_load_failure_policy"] == "recompute"
    assert settings["kv_connector_extra_config"] == {
        "node": "auto",
        "config": str(tmp_path / "h.toml"),
    }


def test_a_hash_algorithm_of_the_user_stays():
    for arguments in (["--prefix-caching-hash-algo", "xxhash"], ["--prefix_caching_hash_algo=x"]):
        assert "sha256_cbor" not in vllm_command("m", arguments, node="auto", config=None)


@pytest.mark.parametrize("arguments", [["--kv-transfer-config", "{}"], ["--kv_transfer_config={}"]])
def test_a_second_connector_is_refused(arguments):
    with pytest.raises(ConfigError, match="vllm serve"):
        vllm_command("m", arguments, node="auto", config=None)


def test_dry_run_prints_what_a_shell_would_run(capsys):
    arguments = ["--dry-run", "--node", "/run/n.sock", "--max-model-len", "4096"]
    with pytest.raises(SystemExit) as ended:
        main(["serve", "m", *arguments])
    assert not ended.value.code
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == ["vllm", "serve", "m"]
    assert words[-2:] == ["--max-model-len", "4096"]
    assert transfer(words)["kv_connector_extra_config"]["node"] == "/run/n.sock"


def test_without_vllm_the_error_says_how_to_install_it(capsys, monkeypatch):
    if Path(sys.executable).with_name("vllm").exists():
        pytest.skip("vLLM is installed here")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "m"])
    assert ended.value.code == 2
    assert "pip install" in capsys.readouterr().err
