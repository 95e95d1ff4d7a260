"""The command `headstart`: puts the commands together and turns errors into exit codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from headstart import __version__, render
from headstart.cli import bench, config, demo, doctor, gate, node, plan, serve, trace, tune
from headstart.errors import HeadstartError

EXIT_USAGE = 2

app = typer.Typer(
    help="Tiered prefix cache for LLM serving: a hit never makes the first token slower.",
    no_args_is_help=True,
    add_completion=False,
    # Plain help: formatting it with rich would double the start-up time.
    rich_markup_mode=None,
    # A bug shows Python's own traceback, without the values of local variables.
    pretty_exceptions_enable=False,
)
app.command(name="demo")(demo.demo)
app.command(
    name="serve",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(serve.serve)
app.command(name="gate", cls=gate.GateCommand)(gate.gate)
app.command(name="doctor")(doctor.doctor)
app.command(name="tune")(tune.tune)
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")
app.add_typer(node.app, name="node")
app.add_typer(plan.app, name="plan")
app.add_typer(trace.app, name="trace")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headstart {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Hold the options that stand before a command; typer reads the function's signature."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line `args`, by default the process's own, and exit.

    An error that the operator can act on becomes one line on stderr and exit code 2.
    """
    try:
        app(args=args, prog_name="headstart")
    except HeadstartError as error:
        render.print_error(str(error))
        raise SystemExit(EXIT_USAGE) from None
