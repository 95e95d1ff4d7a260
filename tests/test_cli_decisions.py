"""`headstart node decisions`: lines of text and of JSON, following, and its ends."""

import json
import math
import os
import signal
import subprocess
import sys
import threading

import msgspec
import pytest

from headstart.cli.main import main
from headstart.node import protocol
from headstart.node.client import NodeClient
from node_process import PATIENT, SOON, NodeProcess

FIELDS = [
    "schema",
    "request_id",
    "prompt_tokens",
    "found_tokens",
    "found_by_tier",
    "loaded_tokens",
    "reason",
    "predicted_load_s",
    "predicted_prefill_s",
    "deadline_s",
    "actual_load_s",
    "actual_prefill_s",
    "saved_s",
    "regret_s",
    "is_late",
]
"""As docs/vllm.md names them."""


def record(request_id, **changes):
    made = protocol.Decided(
        request_id=request_id,
        prompt_tokens=4096,
        found_tokens=2048,
        found_by_tier={"memory": 1024, "file": 2048},
        loaded_tokens=1024,
        reason="part",
        predicted_load_s=0.25,
        predicted_prefill_s=0.5,
        deadline_s=0.75,
        actual_load_s=0.3,
        actual_prefill_s=0.6,
        saved_s=-1.5,
        regret_s=0.125,
        is_late=True,
    )
    return msgspec.structs.replace(made, **changes)


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    started = NodeProcess(tmp_path_factory.mktemp("node"))
    yield started
    started.close()


@pytest.fixture
def tell(node):
    """Tells the node of requests; when it returns, they are in its log."""
    client = NodeClient(node.path, (), limits=PATIENT)
    assert client.connect()

    def call(*records):
        for each in records:
            client.decided(each)
        assert client._ask(protocol.Claim(0), protocol.Claimed) is not None

    yield call
    client.close()


@pytest.fixture
def run(capsys):
    """A function that runs a command line and returns (exit code, stdout, stderr)."""

    def call(*args):
        with pytest.raises(SystemExit) as ended:
            main(["node", "decisions", *map(str, args)])
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return call


class Following:
    """`headstart node decisions --follow` as a process."""

    def __init__(self, node, *options):
        words = ["node", "decisions", "--follow", "--socket", str(node.path), *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headstart", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self):
        """The next line of stdout; a program that gives none is killed."""
        timer = threading.Timer(SOON, self.process.kill)
        timer.start()
        try:
            return self.process.stdout.readline()
        finally:
            timer.cancel()

    def until(self, text):
        """Read lines until one has this text."""
        while text not in (line := self.line()):
            assert line, "it has ended"
        return line

    def ended(self):
        """Exit code and stderr, when it has ended."""
        _, errors = self.process.communicate(timeout=SOON)
        return self.process.returncode, errors


@pytest.fixture
def follow(node):
    made = []

    def make(*options):
        made.append(Following(node, *options))
        return made[-1]

    yield make
    for following in made:
        if following.process.poll() is None:
            following.process.kill()
        following.process.communicate()


# -------------------------------------------------------------------------------------------- lines


def test_json_is_a_line_a_request_with_the_documented_fields(node, tell, run):
    tell(record("json 1"), record("json 2", reason="load"))
    code, out, err = run("--socket", node.path, "--json", "-")
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    first, second = [line for line in lines if line["request_id"].startswith("json ")]
    assert list(first) == FIELDS
    assert first["schema"] == second["schema"] == "headstart.decision/1"
    assert first == {"schema": first["schema"]} | msgspec.structs.asdict(record("json 1"))
    assert second["reason"] == "load"


def test_text_is_a_line_a_request(node, tell, run):
    tell(record("text 1"))
    code, out, err = run("--config", node.config)
    assert code == 0
    assert err.startswith("request, tokens: found, loaded, why;")
    (line,) = [line for line in out.splitlines() if line.startswith("text 1,")]
    assert line == (
        "text 1, 4,096: 2,048, 1,024, part; 300 ms (250 ms) and 600 ms (500 ms); -1.5 s, 125 ms"
    )


def test_json_goes_to_a_file_also_in_a_folder_that_is_not_there(node, tell, run, tmp_path):
    tell(record("file 1"))
    target = tmp_path / "made" / "decisions.jsonl"
    code, out, _ = run("--socket", node.path, "--json", target)
    assert (code, out) == (0, "")
    assert "file 1" in {json.loads(line)["request_id"] for line in target.read_text().splitlines()}


def test_a_file_that_cannot_be_written_is_one_line_and_exit_code_2(node, run, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = run("--socket", node.path, "--json", tmp_path / "file" / "x")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "cannot be written" in err


def test_more_than_a_page_is_shown_completely(node, tell, run):
    tell(*(record(f"page {number}") for number in range(1500)))
    _, out, _ = run("--socket", node.path, "--json", "-")
    ids = [json.loads(line)["request_id"] for line in out.splitlines()]
    assert [each for each in ids if each.startswith("page")] == [f"page {n}" for n in range(1500)]


def test_every_line_of_json_is_json_whatever_engines_say(node, tell, run):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    tell(record("nan", predicted_load_s=math.nan, deadline_s=math.inf), record("odd \n\x1b[2J é"))
    _, out, _ = run("--socket", node.path, "--json", "-")
    lines = [json.loads(line, parse_constant=refuse) for line in out.splitlines()]
    assert "odd \n\x1b[2J é" in {line["request_id"] for line in lines}


def test_the_name_of_a_request_makes_no_line_and_moves_no_cursor(node, tell, run):
    tell(record("evil\nfake, 1: 1, 1, load\x1b[2J"))
    _, out, _ = run("--socket", node.path)
    assert "\x1b" not in out
    assert not any(line.startswith("fake") for line in out.splitlines())


# ------------------------------------------------------------------------------------------- follow


def test_follow_shows_what_comes_and_ends_cleanly_on_ctrl_c(node, tell, follow):
    tell(record("follow 1"))
    following = follow("--json", "-")
    following.until('"follow 1"')
    tell(record("follow 2"), record("follow 3"))
    assert json.loads(following.line())["request_id"] == "follow 2"
    assert json.loads(following.line())["request_id"] == "follow 3"
    following.process.send_signal(signal.SIGINT)
    assert following.ended() == (0, "")


def test_a_reader_that_goes_away_ends_it_without_a_traceback(node, tell, follow):
    tell(record("pipe 1"))
    following = follow("--json", "-")
    following.until('"pipe 1"')
    following.process.stdout.close()
    tell(*(record(f"pipe {number}") for number in range(1000)))
    timer = threading.Timer(SOON, following.process.kill)
    timer.start()
    errors = following.process.stderr.read()
    following.process.wait()
    timer.cancel()
    assert "Traceback" not in errors
    following.process.stdout = None


# ------------------------------------------------------------------------------------------ no node


@pytest.mark.parametrize("options", [[], ["--follow"], ["--json", "-"]], ids=str)
def test_without_a_node_it_says_so_with_exit_code_2(run, tmp_path, options):
    path = tmp_path / "node.sock"
    code, out, err = run("--socket", path, *options)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == (
        f"headstart: no node runs at {path}; start one with `headstart node start`, "
        "or name its --socket"
    )


def test_without_a_node_a_file_of_earlier_decisions_stays(run, tmp_path):
    target = tmp_path / "decisions.jsonl"
    target.write_text("precious\n")
    assert run("--socket", tmp_path / "node.sock", "--json", target)[0] == 2
    assert target.read_text() == "precious\n"


def test_a_node_that_ends_ends_what_follows_it(tmp_path):
    node = NodeProcess(tmp_path)
    client = NodeClient(node.path, (), limits=PATIENT)
    assert client.connect()
    client.decided(record("last"))
    following = Following(node, "--json", "-")
    try:
        following.until('"last"')
        client.close()
        assert node.stop() == 0
        code, errors = following.ended()
    finally:
        following.process.kill()
        node.close()
    assert (code, errors.count("\n")) == (2, 1)
    assert os.fspath(node.path) in errors
