"""`headstart node`: run the process that holds the tiers, and ask it things."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart import render
from headstart.cli.options import ConfigFile, JsonTarget
from headstart.errors import ConfigError, HeadstartError
from headstart.units import format_nbytes, format_seconds

if TYPE_CHECKING:
    from headstart.node.protocol import Reply, Request
    from headstart.settings import Settings

EXIT_FINDING = 1
_VERIFY_S = 24 * 3600.0
_ANSWER_S = 10.0

app = typer.Typer(
    help="The process that holds the tiers for the engines of this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Socket = Annotated[
    Path | None,
    typer.Option(
        "--socket",
        metavar="PATH",
        help="The node's control socket; by default the one that its settings name.",
    ),
]

IdleExit = Annotated[
    str | None,
    typer.Option(
        "--idle-exit", metavar="TIME", help="End when no engine was connected for so long: 10min."
    ),
]


@app.command()
def run(
    config: ConfigFile = None,
    socket: Socket = None,
    idle_exit: IdleExit = None,
    verbose: Annotated[bool, typer.Option(help="Log what happens in detail.")] = False,
) -> None:
    """Run a node in the foreground, until Ctrl-C, SIGTERM or `headstart node stop`.

    Without settings it keeps blocks in memory and in the user's cache folder. It prints one line
    with its socket when it is ready.
    """
    import logging

    from headstart.node.run import run_node

    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    settings = _settings(config, socket, idle_exit)

    def ready(path: Path, port: int) -> None:
        print(f"ready: socket {path}, metrics http://127.0.0.1:{port}/metrics", flush=True)

    run_node(settings, on_ready=ready)


@app.command()
def start(
    config: ConfigFile = None,
    socket: Socket = None,
    idle_exit: IdleExit = None,
    json: JsonTarget = None,
) -> None:
    """Start a node in the background, if none runs, and print its socket."""
    from headstart.node.launch import ensure_node

    settings = _settings(config, socket, idle_exit)
    arguments = ["--config", str(config.absolute())] if config else []
    arguments += ["--idle-exit", idle_exit] if idle_exit else []
    path = ensure_node(settings, arguments)
    fields = {"schema": "headstart.node.start/1", "socket": str(path)}
    render.publish(fields, json, lambda: print(path))


@app.command()
def status(config: ConfigFile = None, socket: Socket = None, json: JsonTarget = None) -> None:
    """Show what a node holds and does. Exit code 2 when there is none."""
    from headstart.node import protocol

    fields = _state(_ask(config, socket, protocol.Status(), _ANSWER_S))
    render.publish(fields, json, lambda: _show_status(fields))


@app.command()
def decisions(
    config: ConfigFile = None,
    socket: Socket = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with new ones, until Ctrl-C.")
    ] = False,
    json: JsonTarget = None,
) -> None:
    """Show what was decided for each request, to load or to compute, and what came of it.

    With --json a line of JSON for each. `regret` is by how much the best choice in hindsight would
    have been faster.
    """
    from headstart.cli.decisions import show_decisions

    def ask(after: int) -> Mapping[str, Any]:
        from headstart.node import protocol

        return _state(_ask(config, socket, protocol.Decisions(after), _ANSWER_S))

    show_decisions(ask, json, follow=follow)


@app.command()
def record(
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Trace to write; must not be there yet.")
    ],
    config: ConfigFile = None,
    socket: Socket = None,
    duration: Annotated[
        str | None,
        typer.Option("--for", metavar="TIME", help="End after so long: 10min; else by Ctrl-C."),
    ] = None,
    max_bytes: Annotated[
        str, typer.Option("--max-bytes", metavar="SIZE", help="End before the file is larger.")
    ] = "1GiB",
    namespace: Annotated[
        str,
        typer.Option(metavar="HEX", help="Only namespaces whose id starts so; see `status`."),
    ] = "",
    json: JsonTarget = None,
) -> None:
    """Write what engines ask as a trace, for `headstart trace` and `headstart tune`.

    No text and no tokens: times, lengths, and which prompts begin alike. Ids of blocks are salted
    by a key that is never written. Look-ups are not slowed: what does not fit a queue is counted
    and left out. Exit code 1 when some is missing.
    """
    from headstart.cli.record import record_trace

    path = _path(config, socket)
    with _reaching(path):
        record_trace(
            path, out, duration=duration, max_bytes=max_bytes, namespace=namespace, json=json
        )


@app.command()
def stop(
    config: ConfigFile = None,
    socket: Socket = None,
    drain: Annotated[
        float,
        typer.Option(min=0.0, max=3600.0, help="Seconds to write what is queued for the disk."),
    ] = 30.0,
    json: JsonTarget = None,
) -> None:
    """End a node: what is queued is written first. Engines go on without it."""
    from headstart.node import protocol
    from headstart.node.launch import has_owner, is_running

    path = _path(config, socket)
    _ask(config, socket, protocol.Stop(drain), _ANSWER_S)
    deadline = time.monotonic() + drain + 60.0
    while has_owner(path) or (path.exists() and is_running(path, timeout_s=1.0)):
        if time.monotonic() > deadline:
            raise ConfigError(f"the node at {path} does not end; its log says why")
        time.sleep(0.1)
    fields = {"schema": "headstart.node.stop/1", "socket": str(path), "stopped": True}
    render.publish(fields, json, lambda: print("stopped"))


@app.command()
def clear(
    config: ConfigFile = None,
    socket: Socket = None,
    namespace: Annotated[
        str,
        typer.Option(metavar="HEX", help="Only the namespaces whose id starts so; see `status`."),
    ] = "",
    json: JsonTarget = None,
) -> None:
    """Forget all blocks in every tier, or those of one model."""
    from headstart.node import protocol

    reply = _ask(config, socket, protocol.Clear(namespace), _VERIFY_S)
    if not isinstance(reply, protocol.Done):
        raise ConfigError("the node gave no answer to clear")
    message = reply.message
    fields = {"schema": "headstart.node.clear/1", "message": message}
    render.publish(fields, json, lambda: print(message))


@app.command()
def verify(config: ConfigFile = None, socket: Socket = None, json: JsonTarget = None) -> None:
    """Read every block of every tier, and drop what is damaged. Exit code 1 when some was."""
    from headstart.node import protocol

    fields = _state(_ask(config, socket, protocol.Verify(), _VERIFY_S))
    render.publish(fields, json, lambda: _show_verify(fields))
    if not fields["good"]:
        raise typer.Exit(EXIT_FINDING)


def _settings(config: Path | None, socket: Path | None, idle_exit: str | None) -> Settings:
    from headstart.config import node_settings
    from headstart.units import parse_seconds

    settings = node_settings(config)
    changes: dict[str, Any] = {}
    if socket is not None:
        changes["socket"] = socket
    if idle_exit is not None:
        try:
            changes["idle_exit"] = parse_seconds(idle_exit)
        except ConfigError as error:
            raise ConfigError(f"--idle-exit: {error}") from error
        if not changes["idle_exit"]:
            raise ConfigError("--idle-exit: must be more than 0 seconds; leave it out for never")
    return settings.model_copy(update={"node": settings.node.model_copy(update=changes)})


def _path(config: Path | None, socket: Path | None) -> Path:
    from headstart.config import node_settings, node_socket

    return socket if socket is not None else node_socket(node_settings(config))


def _ask(config: Path | None, socket: Path | None, message: Request, timeout_s: float) -> Reply:
    from headstart.node import protocol
    from headstart.node.client import command

    path = _path(config, socket)
    with _reaching(path):
        reply = command(path, message, timeout_s)
    if isinstance(reply, protocol.Failed):
        raise ConfigError(reply.message)
    return reply


@contextmanager
def _reaching(path: Path) -> Iterator[None]:
    """Say what is wrong where a node cannot be reached. Raises ConfigError or HeadstartError."""
    try:
        yield
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise ConfigError(
            f"no node runs at {path}; start one with `headstart node start`, or name its --socket"
        ) from error
    except OSError as error:
        raise HeadstartError(f"the node at {path} does not answer: {error}") from error


def _state(reply: Reply) -> Mapping[str, Any]:
    from headstart.node import protocol

    if not isinstance(reply, protocol.State):
        raise ConfigError("the node gave another answer; is it of another release?")
    return reply.fields


def _show_status(fields: Mapping[str, Any]) -> None:
    gauges = fields["gauges"]
    print(
        f"node {fields['pid']}, up {format_seconds(fields['uptime_s'])}: "
        f"{gauges['engines']} engines, {gauges['workers']} workers, {gauges['leases']} leases "
        f"({gauges['leases_claimed']} claimed), {gauges['promotions_waiting']} prompts waiting"
    )
    titles = ("tier", "blocks", "used", "capacity", "hits", "misses", "evicted", "dropped")
    columns = [render.Column(title=title, numeric=title != "tier") for title in titles]
    rows = [
        [
            name,
            f"{tier['num_blocks']:,}",
            format_nbytes(tier["used_nbytes"]),
            format_nbytes(tier["capacity_nbytes"]),
            f"{tier['num_hits']:,}",
            f"{tier['num_misses']:,}",
            f"{tier['num_evicted']:,}",
            f"{tier['num_dropped']:,}",
        ]
        for name, tier in fields["tiers"].items()
    ]
    render.print_table(columns, rows)
    spaces = [
        [tier, space[:16], format_nbytes(nbytes)]
        for tier, held in fields["namespaces"].items()
        for space, nbytes in held.items()
    ]
    if spaces:
        columns = [
            render.Column(title="tier"),
            render.Column(title="namespace"),
            render.Column(title="held", numeric=True),
        ]
        render.print_table(columns, spaces)


def _show_verify(fields: Mapping[str, Any]) -> None:
    titles = ("tier", "blocks", "damaged", "failed", "read")
    columns = [render.Column(title=title, numeric=title != "tier") for title in titles]
    rows = [
        [
            tier["tier"],
            f"{tier['num_blocks']:,}",
            f"{tier['num_damaged']:,}",
            f"{tier['num_failed']:,}",
            format_nbytes(tier["read_nbytes"]),
        ]
        for tier in fields["tiers"]
    ]
    render.print_table(columns, rows)
