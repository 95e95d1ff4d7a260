"""Options that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from headstart.errors import ConfigError

JsonTarget = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE|-",
        help="Write the result as JSON to FILE, or to stdout instead of the table.",
    ),
]

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Settings file (TOML); by default the one HEADSTART_CONFIG names.",
    ),
]


def parse_share(option: str, text: str, *, most: float = 1.0) -> float:
    """The share of `25%` or `0.25`. Raises ConfigError, which names the option."""
    try:
        number = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        number = -1.0
    if not 0.0 <= number <= most:
        raise ConfigError(f"{option} {text!r} is no share; write 25% or 0.25")
    return number


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that are dataclasses stand for the fields of those.

    Each field is an option, annotated as a parameter would be; the command gets the dataclass. So
    commands share options without repeating them.
    """
    asked = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: each.annotation for name, each in asked.items() if is_dataclass(each.annotation)
    }

    @wraps(command)
    def called(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**made, **given)

    shown = [each for name, each in asked.items() if name not in groups]
    for group in groups.values():
        hints = get_type_hints(group, include_extras=True)
        shown += [_parameter(field, hints[field.name]) for field in fields(group)]
    called.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return called


def _parameter(field: Field[Any], annotation: object) -> inspect.Parameter:
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if field.default is MISSING else field.default,
        annotation=annotation,
    )
