"""`headstart node`: what it prints, its JSON, its exit codes, and its errors in one line."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from headstart.cli import node as cli
from headstart.cli.main import main
from headstart.config import open_store
from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.node import protocol
from headstart.node.client import NodeClient, command
from headstart.settings import Settings
from node_process import PATIENT, SOON, write_settings

BLOCK = 64 << 10
LAYOUT = BlockLayout(block_size=16, axes="byte", shape=(BLOCK,), dtype="uint8")
NAMESPACE = Namespace(model="cli", weights="none", layout=LAYOUT)
CHAIN = keys_from_hashes(NAMESPACE, [b"a", b"b", b"c"])


@pytest.fixture
def run(capsys):
    """A function that runs a command line and returns (exit code, stdout, stderr)."""

    def call(*args):
        with pytest.raises(SystemExit) as ended:
            main(["node", *map(str, args)])
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture
def config(tmp_path):
    return write_settings(tmp_path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "node.sock"


def has_ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture
def started(run, config, path):
    """A node that `headstart node start` has started."""
    assert run("start", "--config", config) == (0, f"{path}\n", "")
    pid = command(path, protocol.Status(), SOON).fields["pid"]
    yield pid
    if not has_ended(pid):
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + SOON
        while not has_ended(pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def store(path):
    """Three blocks, stored by an engine that holds nothing afterwards."""
    client = NodeClient(path, (), limits=PATIENT)
    client.open_namespace(NAMESPACE)
    ticket, reserved = client.reserve(CHAIN)
    assert len(reserved.offsets) == 3
    client.commit(ticket)
    assert client.promote(CHAIN).num_held == 3
    client.close()
    deadline = time.monotonic() + SOON
    while True:  # all three are there, and written
        told = command(path, protocol.Status(), SOON).fields
        if told["tiers"]["file"]["num_blocks"] == 3 and not told["loads"]["queued_nbytes"]:
            break
        assert time.monotonic() < deadline


def test_the_life_of_a_node(run, config, path, started, tmp_path):
    """One node for all of this: each start costs a second."""
    assert run("start", "--config", config, "--json", "-") == (
        0,
        json.dumps({"schema": "headstart.node.start/1", "socket": str(path)}, indent=2) + "\n",
        "",
    )
    store(path)

    code, out, err = run("status", "--socket", path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"node {started}, up ")
    assert lines[0].endswith("0 engines, 0 workers, 0 leases (0 claimed), 0 prompts waiting")
    assert " ".join(lines[1].split()) == "tier blocks used capacity hits misses evicted dropped"
    assert lines[2].split()[:7] == ["memory", "3", "192", "KiB", "16", "MiB", "3"]
    assert f"memory  {NAMESPACE.id.hex()[:16]}  192 KiB" in lines

    target = tmp_path / "made" / "status.json"
    code, out, err = run("status", "--config", config, "--json", target)
    document = json.loads(target.read_text())
    assert (code, document["schema"]) == (0, "headstart.node.status/1")
    assert document["tiers"]["file"]["num_blocks"] == 3
    code, out, _ = run("status", "--socket", path, "--json", "-")
    assert json.loads(out)["pid"] == started

    code, out, err = run("verify", "--socket", path)
    assert (code, err) == (0, "")
    assert out.splitlines()[0].split() == ["tier", "blocks", "damaged", "failed", "read"]
    code, out, _ = run("verify", "--socket", path, "--json", "-")
    assert (code, json.loads(out)["good"]) == (0, True)

    code, out, err = run("clear", "--socket", path, "--namespace", "zz")
    assert (code, out) == (2, "")
    known = NAMESPACE.id.hex()[:16]
    assert err == f"headstart: no namespace starts with 'zz'; known: {known}\n"
    assert run("clear", "--socket", path, "--namespace", known[:6]) == (
        0,
        "forgot 3 blocks of 1 namespaces\n",
        "",
    )
    code, out, _ = run("clear", "--socket", path, "--json", "-")
    assert json.loads(out) == {
        "schema": "headstart.node.clear/1",
        "message": "forgot 0 blocks of 1 namespaces",
    }

    code, out, err = run("stop", "--socket", path, "--json", "-")
    assert (code, err) == (0, "")
    assert json.loads(out)["stopped"] is True
    assert not path.exists()
    with open_store(Settings.from_toml(config)):
        pass  # what it held is free


def test_stop_waits_until_what_is_stored_is_on_the_disk(run, config, path, started):
    store(path)
    assert run("stop", "--config", config) == (0, "stopped\n", "")
    with open_store(Settings.from_toml(config)) as opened:
        opened.open_namespace(NAMESPACE)
        assert opened.lookup(CHAIN).by_tier == {"memory": 0, "file": 3}


def test_verify_finds_damage_with_exit_code_1(run, path, started, tmp_path):
    store(path)
    for slab in (tmp_path / "file" / "slabs").iterdir():
        with slab.open("r+b") as file:
            file.seek(4096 + 100)
            file.write(b"damage")
    code, out, err = run("verify", "--socket", path)
    assert (code, err) == (1, "")
    assert [line.split()[2] for line in out.splitlines()[1:]] == ["0", "1"]


# ------------------------------------------------------------------------------------------ no node


@pytest.mark.parametrize("words", [["status"], ["stop"], ["clear"], ["verify"]])
def test_no_node_is_one_line_and_exit_code_2(run, path, words):
    code, out, err = run(*words, "--socket", path)
    assert (code, out) == (2, "")
    assert err == (
        f"headstart: no node runs at {path}; start one with `headstart node start`, "
        "or name its --socket\n"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stale:
        stale.bind(os.fspath(path))
    assert run(*words, "--socket", path)[::2] == (2, err), "nor behind a socket that was left"


def test_what_is_no_node_is_told_so(run, path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(os.fspath(path))
        other.listen(1)
        other.settimeout(SOON)

        def answer():
            sock, _ = other.accept()
            with sock:
                sock.recv(100)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        code, _, err = run("status", "--socket", path)
        thread.join()
    assert (code, err.count("\n")) == (2, 1)
    assert "does not speak Headstart's protocol" in err


def test_a_node_that_does_not_answer_is_told_so(run, path, monkeypatch):
    monkeypatch.setattr(cli, "_ANSWER_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(os.fspath(path))
        silent.listen(1)
        code, _, err = run("status", "--socket", path)
    assert (code, err.count("\n")) == (2, 1)
    assert f"the node at {path} does not answer" in err


# ----------------------------------------------------------------------------------- wrong options


@pytest.mark.parametrize("verb", ["run", "start"])
@pytest.mark.parametrize(
    ("idle_exit", "message"),
    [("soon", "'soon' is not a quantity"), ("5 weeks", "unit 'weeks'"), ("0", "more than 0")],
)
def test_a_bad_idle_exit_is_refused(run, config, path, verb, idle_exit, message):
    code, out, err = run(verb, "--config", config, "--idle-exit", idle_exit)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("headstart: --idle-exit: ")
    assert message in err
    assert not path.exists()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["status", "--nonsense"],
        ["run", "--config", "/does/not/exist.toml"],
        ["stop", "--drain", "-1"],
        ["stop", "--drain", "long"],
        ["stop", "--drain", "inf"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(run, words):
    assert run(*words)[0] == 2


def test_wrong_settings_are_one_line_and_exit_code_2(run, config):
    config.write_text("[node]\nsockt = 'x'\n")
    code, out, err = run("status", "--config", config)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "node.sockt is unknown; did you mean 'socket'?" in err


def test_a_start_that_fails_says_why(run, config, path):
    config.write_text(config.read_text().replace('"16MiB"', '"900TiB"'))
    code, out, err = run("start", "--config", config)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "memory.capacity" in err
    assert str(path.with_suffix(".log")) in err


def test_a_port_that_is_taken_is_one_line_and_nothing_is_left(config, path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config.write_text(config.read_text().replace("port = 0", f"port = {port}"))
        done = subprocess.run(
            [sys.executable, "-m", "headstart", "node", "run", "--config", config],
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert f"headstart: node.metrics_port {port}: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not path.exists()


def test_json_that_cannot_be_written_is_an_error(run, path, started, tmp_path):
    code, _, err = run("status", "--socket", path, "--json", tmp_path / "node.toml" / "x")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be written" in err


def test_help_names_every_command(run):
    code, out, _ = run("--help")
    assert code == 0
    for name in ("run", "start", "status", "stop", "clear", "verify"):
        assert f"\n  {name} " in out
        assert run(name, "--help")[0] == 0
