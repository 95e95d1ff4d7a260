"""The command line: exit codes, where output goes, and `headstart config`."""

import io
import json
import os
import resource
import subprocess
import sys

import pytest

from headstart import __version__, render
from headstart.cli.main import main
from headstart.errors import ConfigError

GOOD = """
[memory]
capacity = "1GiB"

[[tiers]]
kind = "file"
root = "/nvme/headstart"
capacity = 107374182401
durable = false
"""


@pytest.fixture
def run(capsys):
    """A function that runs a command line and returns (exit code, stdout, stderr)."""

    def call(*args):
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "headstart.toml"
        path.write_text(text)
        return path

    return write


def test_version(run):
    assert run("--version") == (0, f"headstart {__version__}\n", "")


def test_help_lists_the_commands(run):
    code, out, err = run("--help")
    assert code == 0
    assert "config" in out
    assert err == ""


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nonsense"],
        ["config"],
        ["config", "nonsense"],
        ["config", "show", "--nonsense"],
        ["config", "show", "--config", "/does/not/exist.toml"],
    ],
)
def test_wrong_usage_exits_with_2(run, args):
    code, _, _ = run(*args)
    assert code == 2


def test_python_dash_m_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "headstart", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"headstart {__version__}\n"


def test_config_show_lists_values_and_where_they_come_from(run, config_file):
    code, out, err = run("config", "show", "--config", config_file(GOOD))
    assert (code, err) == (0, "")
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()}
    assert lines["memory.capacity"] == "1 GiB set"
    assert lines["memory.policy"] == "lru default"
    assert lines["memory.slab_nbytes"] == "- default"
    assert lines["tiers[0].root"] == "/nvme/headstart set"
    assert lines["tiers[0].capacity"] == "107374182401 B set"
    assert lines["tiers[0].durable"] == "false set"
    assert lines["tiers[0].namespace_ttl"] == "30 d default"


def test_config_show_without_a_file_shows_the_defaults(run):
    code, out, _ = run("config", "show")
    assert code == 0
    assert "default" in out
    assert " set" not in out


def test_config_show_as_json(run, config_file):
    code, out, _ = run("config", "show", "--config", config_file(GOOD), "--json", "-")
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == "headstart.config.show/1"
    assert document["settings"]["tiers"][0]["root"] == "/nvme/headstart"


def test_config_show_follows_the_environment(run, config_file, monkeypatch):
    monkeypatch.setenv("HEADSTART_MEMORY__POLICY", "fifo")
    _, out, _ = run("config", "show", "--config", config_file(GOOD), "--json", "-")
    assert json.loads(out)["settings"]["memory"]["policy"] == "fifo"


def test_an_error_is_one_line_on_stderr_and_exit_2(run, config_file):
    code, out, err = run("config", "show", "--config", config_file("[memory]\ncapacty = '1GiB'\n"))
    assert (code, out) == (2, "")
    assert err.startswith("headstart: ")
    assert err.count("\n") == 1
    assert "capacty" in err
    assert "capacity" in err.replace("capacty", "")


def test_config_check_of_good_settings(run, config_file):
    assert run("config", "check", "--config", config_file(GOOD)) == (
        0,
        "the settings are valid\n",
        "",
    )


def test_config_check_finds_what_is_wrong(run, config_file, tmp_path):
    bad = config_file("[memory]\ncapacity = 'much'\n")
    report = tmp_path / "made" / "report.json"
    code, out, err = run("config", "check", "--config", bad, "--json", report)
    assert (code, err) == (1, "")
    assert "memory.capacity" in out
    document = json.loads(report.read_text())
    assert document["schema"] == "headstart.config.check/1"
    assert document["valid"] is False
    assert "much" in document["problem"]


def test_json_that_cannot_be_written_is_an_error(run, config_file, tmp_path):
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "report.json"
    code, _, err = run("config", "check", "--config", config_file(GOOD), "--json", target)
    assert code == 2
    assert "cannot be written" in err


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


COLUMNS = (render.Column(title="tier"), render.Column(title="blocks", numeric=True))
ROWS = [("memory", "9"), ("tiers[0]", "1000")]


def test_a_piped_table_is_aligned_plain_lines(capsys):
    render.print_table(COLUMNS, ROWS, title="Tiers")
    assert capsys.readouterr().out.splitlines() == [
        "Tiers",
        "tier      blocks",
        "memory         9",
        "tiers[0]    1000",
    ]


def test_a_table_on_a_terminal_is_drawn_and_keeps_brackets(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    render.print_table(COLUMNS, ROWS)
    assert "tiers[0]" in terminal.getvalue()
    assert "│" in terminal.getvalue()


def test_a_row_must_fit_the_columns():
    with pytest.raises(ValueError, match="2 cells"):
        render.print_table(COLUMNS, [("memory",)])


def test_progress_is_silent_where_stderr_is_no_terminal(capsys):
    with render.progress("reading") as advance:
        advance("blocks", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_progress_is_drawn_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with render.progress("reading") as advance:
        advance("blocks", 1, 2)
    assert "reading" in terminal.getvalue()
    assert "blocks" in terminal.getvalue()


def test_a_document_needs_a_schema():
    with pytest.raises(ValueError, match="schema"):
        render.publish({}, None, lambda: None)


def test_errors_of_several_lines_become_one(capsys):
    render.print_error(str(ConfigError("first\n  second\n\n")))
    assert capsys.readouterr().err == "headstart: first; second\n"


def test_what_there_is_so_far_is_saved_whole(tmp_path):
    path = tmp_path / "new" / "result.json"
    for target in (None, "-", str(path)):
        render.save({"schema": "x/1", "runs": [1]}, target)
    render.save({"schema": "x/1", "runs": [1, 2]}, str(path))
    assert json.loads(path.read_text())["runs"] == [1, 2]
    assert [each.name for each in path.parent.iterdir()] == ["result.json"]
    link = tmp_path / "link.json"
    link.symlink_to(path)
    render.save({"schema": "x/1"}, str(link))
    assert (link.is_symlink(), json.loads(path.read_text())) == (True, {"schema": "x/1"})
    render.save({"schema": "x/1"}, "/dev/null")
    with pytest.raises(ConfigError, match="cannot be written"):
        render.save({"schema": "x/1"}, "/proc/none/x")
    with pytest.raises(ValueError, match="JSON"):
        render.save({"schema": "x/1", "nan": float("nan")}, str(path))
    assert json.loads(path.read_text()) == {"schema": "x/1"}, "what was there stays"


def test_a_result_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    path = tmp_path / "result.json"
    render.check_target(str(path))
    assert not list(tmp_path.iterdir()), "it was only looked at"
    render.save({"schema": "x/1"}, str(path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(ConfigError, match="cannot be written: File too large"):
            render.save({"schema": "x/1", "text": "x" * 2000}, str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert json.loads(path.read_text()) == {"schema": "x/1"}, "what was there stays"
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]
    with pytest.raises(ConfigError, match="Is a directory"):
        render.check_target(str(tmp_path))
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "not there yet.json")
    render.check_target(str(link))
    assert link.is_symlink()


def test_a_pipe_gets_only_the_whole(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    render.check_target(str(pipe))
    render.save({"schema": "x/1", "runs": [1]}, str(pipe))
    render.publish({"schema": "x/1", "runs": [1, 2]}, str(pipe), lambda: None)
    assert json.loads(os.read(reader, 1000)) == {"schema": "x/1", "runs": [1, 2]}
    os.close(reader)


def test_what_others_wrote_moves_no_cursor(capsys):
    render.print_table(COLUMNS, [("\x1b[2Jgone\r\n", "1")])
    render.print_error("it says \x1b[31mred\x07")
    printed = capsys.readouterr()
    assert " [2Jgone" in printed.out
    assert printed.err == "headstart: it says  [31mred\n"
    assert not {"\x1b", "\r", "\x07"} & set(printed.out + printed.err)


def test_a_result_is_written_though_it_cannot_be_shown(tmp_path):
    def show():
        raise BrokenPipeError

    path = tmp_path / "result.json"
    with pytest.raises(BrokenPipeError):
        render.publish({"schema": "x/1"}, str(path), show)
    assert json.loads(path.read_text()) == {"schema": "x/1"}
