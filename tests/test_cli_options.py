"""Options that are grouped in dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from headstart.cli.options import grouped


@dataclass(frozen=True, kw_only=True)
class Colours:
    front: Annotated[str, typer.Option(help="The text's.")]
    back: Annotated[int, typer.Option("--behind", min=0)] = 3


@pytest.fixture
def run():
    app, seen = typer.Typer(), []

    @app.command()
    @grouped
    def paint(colours: Colours, wet: bool = False) -> None:
        """Paint."""
        seen.append((colours, wet))

    def call(*words):
        return CliRunner().invoke(app, list(words)), seen

    return call


def test_fields_are_options_and_come_as_their_dataclass(run):
    result, seen = run("--front", "red", "--behind", "5", "--wet")
    assert result.exit_code == 0
    assert seen == [(Colours(front="red", back=5), True)]
    assert run("--front", "blue")[1][1] == (Colours(front="blue"), False)


def test_they_are_checked_and_explained(run):
    assert run()[0].exit_code == 2
    assert run("--front", "red", "--behind", "-1")[0].exit_code == 2
    shown = run("--help")[0].output
    assert "The text's." in shown
    assert "--behind" in shown
    assert "colours" not in shown
