"""`headstart config`: what the settings are, and whether they are valid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, get_type_hints

import typer

from headstart import render
from headstart.cli.options import ConfigFile, JsonTarget
from headstart.errors import ConfigError
from headstart.units import format_nbytes, parse_nbytes

if TYPE_CHECKING:
    from pydantic import BaseModel

EXIT_FINDING = 1
SHOW_SCHEMA = "headstart.config.show/1"
CHECK_SCHEMA = "headstart.config.check/1"

COLUMNS = (
    render.Column(title="setting"),
    render.Column(title="value"),
    render.Column(title="from"),
)

app = typer.Typer(help="Show or check the settings.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def show(config: ConfigFile = None, json: JsonTarget = None) -> None:
    """Print every setting, its value, and if it is set or default."""
    from headstart.config import load_settings

    settings = load_settings(config)
    document = {"schema": SHOW_SCHEMA, "settings": settings.model_dump(mode="json")}
    rows = list(_rows(settings, ""))
    render.publish(document, json, lambda: render.print_table(COLUMNS, rows))


@app.command()
def check(config: ConfigFile = None, json: JsonTarget = None) -> None:
    """Say whether the settings are valid; exit 1 when not. Opens no tier."""
    from headstart.config import load_settings

    problem = None
    try:
        load_settings(config)
    except ConfigError as error:
        problem = str(error)
    document = {"schema": CHECK_SCHEMA, "valid": problem is None, "problem": problem}
    render.publish(document, json, lambda: typer.echo(problem or "the settings are valid"))
    if problem is not None:
        raise typer.Exit(EXIT_FINDING)


def _rows(settings: BaseModel, prefix: str) -> Iterator[tuple[str, str, str]]:
    """(path, value, origin) of each setting below `settings`, in the order of the model."""
    from pydantic import BaseModel

    hints = get_type_hints(type(settings), include_extras=True)
    for name in type(settings).model_fields:
        path = f"{prefix}{name}"
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from _rows(value, f"{path}.")
        elif isinstance(value, tuple) and value:
            for index, each in enumerate(value):
                yield from _rows(each, f"{path}[{index}].")
        else:
            origin = "set" if name in settings.model_fields_set else "default"
            yield path, _text(value, hints[name]), origin


def _text(value: object, hint: object) -> str:
    """A value as it may be written in the settings file, sizes and durations with their unit."""
    from headstart.settings import Nbytes, Seconds

    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and hint in (Nbytes, Nbytes | None):
        short = format_nbytes(value)
        return short if parse_nbytes(short) == value else f"{value} B"
    if isinstance(value, float) and hint == Seconds:
        return _duration(value)
    return str(value)


def _duration(seconds: float) -> str:
    for unit, factor in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= factor and seconds % factor == 0:
            return f"{seconds / factor:.0f} {unit}"
    return f"{seconds:.10g} s"
