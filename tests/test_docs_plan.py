"""The commands of docs/plan.md print what the page says they do."""

from __future__ import annotations

import re
import shlex
from importlib.resources import files
from pathlib import Path

import pytest

from headstart.cli.main import main
from headstart.sizing.hardware import look_up, read_hardware

PAGE = (Path(__file__).parents[1] / "docs" / "plan.md").read_text()
COMMANDS = re.findall(r"```console\n\$ (headstart plan .*)\n((?:.+\n)*)```", PAGE)
HARDWARE = re.findall(r"```toml\n((?:.*\n)*?)```", PAGE)


@pytest.fixture
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    model = files("headstart.sizing.models").joinpath("llama-3.1-70b.json").read_text()
    (tmp_path / "config.json").write_text(model)
    (tmp_path / "hw.toml").write_text(HARDWARE[0])
    monkeypatch.chdir(tmp_path)


def test_every_question_has_a_command():
    assert len(COMMANDS) == PAGE.count("```console") == 10
    assert all(printed for _, printed in COMMANDS)


@pytest.mark.usefixtures("in_a_folder_of_its_own")
@pytest.mark.parametrize(("command", "printed"), COMMANDS, ids=[each[15:] for each, _ in COMMANDS])
def test_a_command_prints_what_the_page_says(capsys, command, printed):
    if "--html" in command:
        pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as end:
        main(shlex.split(command)[1:])
    assert end.value.code == 0
    lines = iter(capsys.readouterr().out.splitlines())
    for wanted in printed.splitlines():
        assert wanted in lines  # in this order: each is looked for after the one before


def test_the_hardware_files_of_the_page(tmp_path):
    for text in HARDWARE:
        path = tmp_path / "hw.toml"
        path.write_text(text)
        assert look_up(read_hardware(path)).num_gpus == 8
