"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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

Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a page with plots to FILE; needs matplotlib."),
]

SloText = Annotated[
    str | None,
    typer.Option(
        "--slo",
        help="What requests have to meet, such as ttft=2s,tpot=100ms,latency=30s, or a preset such "
        "as mlperf-llama3.1-8b-server, which is only MLPerf-style.",
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
