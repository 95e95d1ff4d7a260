"""`headstart serve`: the whole `vllm serve` command, shown and run."""

from __future__ import annotations

import os
import shlex
from typing import Annotated

import typer

from headstart.cli.options import ConfigFile


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
    from headstart.engines.vllm.command import headstart_arguments, server_words

    command = [*server_words(model), *headstart_arguments(context.args, node=node, config=config)]
    print(shlex.join(command), flush=True)
    if not dry_run:
        os.execv(command[0], command)
