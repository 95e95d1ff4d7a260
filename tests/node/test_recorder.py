"""`headstart node record`: what is asked becomes a trace; nothing else of it leaves the node."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import socket
import stat
import threading

import pytest

from headstart.cli.main import main
from headstart.errors import ConfigError
from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.node import protocol
from headstart.node.recorder import Recorder
from headstart.node.recording import Recording
from headstart.tuner.facts import infinite
from headstart.tuner.recorded import record

BLOCK = 64 << 10
LAYOUT = BlockLayout(block_size=16, axes="byte", shape=(BLOCK,), dtype="uint8")
NAMESPACE = Namespace(model="node", weights="none", layout=LAYOUT)
LONGER = Namespace(
    model="other",
    weights="none",
    layout=BlockLayout(block_size=32, axes="byte", shape=(BLOCK,), dtype="uint8"),
)
COSTS = protocol.Costs(0.01, 1e-4, 1e-9, 0.1, 2048, 1e10)


def chain(path, namespace=NAMESPACE):
    return keys_from_hashes(namespace, [str(content).encode() for content in path])


def asked(num_tokens):
    return protocol.Asked(num_tokens=num_tokens, block_size=16, costs=COSTS)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "new" / "asked.jsonl"


@pytest.fixture
def recordings(world):
    """Begins recordings of the served `world`; ended before it."""
    with contextlib.ExitStack() as stack:

        def make(file, **options):
            return stack.enter_context(Recording(world.serve(), file, **options))

        yield make


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


# ------------------------------------------------------------------------------------- what is kept


def test_a_line_has_the_documented_fields(client, recordings, out):
    recording = recordings(out)
    client.promote(chain("abc"), asked(55))
    client.promote(chain("abd"))
    recording.step()
    first, second = lines_of(out)
    assert list(first) == [
        *("timestamp", "input_length", "output_length", "hash_ids", "block_size"),
    ]
    assert (first["input_length"], first["output_length"], first["block_size"]) == (55, 0, 16)
    assert second["input_length"] == 48, "those of its blocks: nobody told more"
    assert first["hash_ids"][:2] == second["hash_ids"][:2]
    ids = {*first["hash_ids"], *second["hash_ids"]}
    assert len(ids) == 4
    assert all(0 <= each < 2**53 for each in ids)
    assert 0 <= first["timestamp"] <= second["timestamp"] < 60_000
    assert recording.written.num_prompts == 2
    assert recording.written.nbytes == out.stat().st_size
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


def test_two_recordings_have_nothing_in_common(world, client, recordings, tmp_path, soon):
    found = []
    for name in ("one", "two"):
        with recordings(tmp_path / name) as recording:
            client.promote(chain("abc"))
            recording.step()
        found.append(set(lines_of(tmp_path / name)[0]["hash_ids"]))
        soon(lambda: world.services.recorder._owner is None, "an end")
    assert len(found[0]) == len(found[1]) == 3
    assert found[0].isdisjoint(found[1])


def test_no_key_and_no_salt_is_in_the_file(client, recordings, out):
    recording = recordings(out)
    run = chain(["a secret", "b"])
    client.promote(run)
    recording.step()
    text = out.read_bytes()
    numbers = {
        int.from_bytes(key[start : start + 8], order) >> shift
        for key in (*run.keys, recording._salt)
        for start in range(25)
        for order in ("big", "little")
        for shift in (0, 11)
    }
    assert numbers.isdisjoint(lines_of(out)[0]["hash_ids"])
    for key in (*run.keys, recording._salt, NAMESPACE.id):
        assert key not in text
        assert key.hex().encode() not in text
    assert b"secret" not in text


def test_the_trace_is_read_and_hits_what_was_asked_again(client, recordings, out):
    recording = recordings(out)
    for path, length in (("abc", 50), ("abcd", 64), ("x", 31), ("abcd", 64)):
        client.promote(chain(path), asked(length))
    recording.step()
    trace = record(out)
    assert (trace.block_size, len(trace)) == (16, 4)
    assert trace.input_tokens.tolist() == [50, 64, 31, 64]
    assert trace.lengths.tolist() == [3, 4, 1, 4]
    assert infinite(trace).tokens_cold == (48 + 64) / (50 + 64 + 31 + 64)


@pytest.mark.parametrize("num_tokens", [1, 47, 48, 63, 64, 2**40])
def test_a_line_can_be_read_whatever_an_engine_says_of_its_length(
    client, recordings, out, num_tokens
):
    recording = recordings(out)
    client.promote(chain("abc"), asked(num_tokens))
    recording.step()
    (length,) = record(out).input_tokens
    assert length == min(max(num_tokens, 48), 63)


def test_only_the_namespaces_that_are_wanted(world, client, recordings, out):
    client.open_namespace(LONGER)
    recording = recordings(out, namespace=LONGER.id.hex()[:8].upper())
    client.promote(chain("ab"))
    client.promote(chain("ab", LONGER))
    recording.step()
    assert [row["block_size"] for row in lines_of(out)] == [32]


def test_prompts_of_several_block_sizes_are_told_when_they_are_read(client, recordings, out):
    client.open_namespace(LONGER)
    recording = recordings(out)
    client.promote(chain("ab"))
    client.promote(chain("ab", LONGER))
    recording.step()
    with pytest.raises(ConfigError, match=r"line 2: blocks of 32 tokens after some of 16: .*--nam"):
        record(out)
    with pytest.raises(ConfigError, match="stand for 16 tokens, as it says itself, not for 8"):
        record(out, trace_block_size=8)


# ---------------------------------------------------------------------------------- begins and ends


def test_nothing_is_kept_while_nobody_records(world, client, recordings, out, soon, caplog):
    caplog.set_level(logging.INFO)
    recorder = world.services.recorder
    client.promote(chain("ab"))
    assert not recorder._queue
    with recordings(out) as recording:
        client.promote(chain("ab"))
        client.promote(chain("abc"))
        assert len(recorder._queue) == 2
        recording.step()
        assert not recorder._queue
        client.promote(chain("abcd"))
    soon(lambda: recorder._owner is None, "an end")
    assert (len(recorder._queue), recorder._queued_nbytes) == (0, 0)
    client.promote(chain("abcd"))
    assert not recorder._queue
    assert len(lines_of(out)) == 2
    assert "is recorded from now on" in caplog.text
    assert "not recorded any more" in caplog.text


def test_one_records_at_a_time(recordings, tmp_path, soon):
    with recordings(tmp_path / "one"):
        with pytest.raises(ConfigError, match="somebody records what this node is asked already"):
            recordings(tmp_path / "two")
        assert not (tmp_path / "two").exists()

    def is_free():
        with contextlib.suppress(ConfigError):
            return recordings(tmp_path / "two")

    assert soon(is_free).written.num_prompts == 0


def test_a_recording_ends_when_its_time_is_over(client, recordings, out):
    recording = recordings(out)
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds
        client.promote(chain([str(len(slept))]))

    recording.run(0.9, clock=lambda: now[0], sleep=sleep)
    assert sum(slept) == pytest.approx(0.9)
    assert len(lines_of(out)) == len(slept) > 3


def test_what_is_left_when_the_time_is_over_is_taken(world, client, recordings, out):
    recording = recordings(out)
    client.promote(chain("a"))  # of which the node knows the namespace
    recording.step()
    for number in range(5):
        keys = bytes([number]) * (1 << 20)
        world.services.recorder.see(protocol.Promote(1, 1, NAMESPACE.id, BLOCK, keys))
    recording.run(0.0, clock=lambda: 0.0, sleep=lambda seconds: pytest.fail("it waits"))
    assert recording.written.num_prompts == 6


def test_a_recording_ends_before_its_file_is_too_large(client, recordings, out):
    recording = recordings(out, max_nbytes=1000)
    for number in range(30):
        client.promote(chain([number, 0]))
    recording.run(1e9, sleep=lambda seconds: pytest.fail("it goes on"))
    assert recording.written.is_full
    assert 900 < out.stat().st_size <= 1000
    assert len(lines_of(out)) == recording.written.num_prompts < 30
    assert record(out).block_size == 16


def test_a_recording_ends_with_the_node(world, client, recordings, out):
    recording = recordings(out)
    client.promote(chain("ab"))
    recording.step()
    world.server.close()
    recording.run(1e9, sleep=lambda seconds: pytest.fail("it goes on"))
    assert recording.written.has_ended
    assert len(lines_of(out)) == 1


# ------------------------------------------------------------------------------- what is too much


def test_a_full_disk_costs_lines_and_no_file(client, recordings, out):
    recording = recordings(out)
    client.promote(chain("abc"))
    recording.step()
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for path in ("abd", "abe"):
        client.promote(chain(path))
    # As on a full disk, a part of the line is written before the error comes.
    resource.setrlimit(resource.RLIMIT_FSIZE, (out.stat().st_size + 20, most))
    try:
        recording.step()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
    assert recording.written.num_refused == 2
    assert recording.written.problem == os.strerror(27)
    client.promote(chain("abf"))
    recording.step()
    assert len(lines_of(out)) == recording.written.num_prompts == 2
    assert record(out).lengths.tolist() == [3, 3]


def test_what_is_not_taken_is_lost_and_counted():
    recorder = Recorder(max_queued_nbytes=1000, clock=iter([5.0, 5.5, 6.0, 7.0, 9.0]).__next__)
    recorder.knows(b"n", 16)
    me = object()
    assert recorder.take(me) == protocol.Recorded((), 0)
    keys = bytes(range(64))
    for _ in range(7):
        recorder.see(protocol.Promote(1, 1, b"n", BLOCK, keys))
    prompts, num_lost = (recorder.take(me).prompts, recorder.take(me).num_lost)
    assert prompts == tuple(protocol.Prompt(at_s, 16, 32, keys) for at_s in (0.5, 1.0, 2.0))
    assert num_lost == 4
    recorder.see(protocol.Promote(1, 1, b"unknown", BLOCK, keys))
    recorder.see(protocol.Promote(1, 1, b"n", BLOCK, b""))
    recorder.see(protocol.Promote(1, 1, b"n", BLOCK, keys, asked(40)))
    assert recorder.take(me) == protocol.Recorded((protocol.Prompt(4.0, 16, 40, keys),), 5)
    recorder.stop(object())
    assert recorder.take(me).num_lost == 5, "another's end is not this one's"


def test_much_is_taken_piece_by_piece():
    recorder = Recorder()
    recorder.knows(b"n", 16)
    me = object()
    recorder.take(me)
    for _ in range(20):
        recorder.see(protocol.Promote(1, 1, b"n", BLOCK, bytes(1 << 20)))
    taken = []
    while more := recorder.take(me):
        if not more.prompts:
            break
        assert len(protocol.pack(more)) < 3 << 20
        taken.append(len(more.prompts))
    assert sum(taken) == 20
    assert max(taken) < 3


def test_the_recorders_client_is_served_whatever_it_asks(world, connect):
    """Its connection may ask other things, too, and the first word wins."""
    sock = connect()
    for message in (protocol.Record("zz"), protocol.Status(), protocol.Record("")):
        sock.sendall(protocol.pack(message))
        reply = protocol.unpack_reply(protocol.receive(sock, None))
        assert isinstance(reply, (protocol.Recorded, protocol.State))


# ------------------------------------------------------------------------------- the command line


@pytest.fixture
def run(capsys):
    def call(*args):
        with pytest.raises(SystemExit) as ended:
            main(["node", "record", *map(str, args)])
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return call


def test_the_command_writes_a_trace_that_the_tuner_reads(world, clients, run, out, capsys):
    path = world.serve()
    engine = clients(path)
    is_over = threading.Event()

    def ask():
        number = 0
        while not is_over.is_set():
            engine.promote(chain([number % 7, number % 3, 1, 2, 3]), asked(83))
            number += 1

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        words = ("--socket", path, "--out", out, "--for", "1h", "--max-bytes", "20KiB")
        code, printed, told = run(*words, "--json", "-")
    finally:
        is_over.set()
        asking.join()
    document = json.loads(printed)
    assert (code, document["schema"]) == (0, "headstart.node.record/1")
    assert document["is_full"]
    assert document["prompts"] == len(lines_of(out)) > 20
    assert "Ctrl-C ends it" in told
    with pytest.raises(SystemExit):
        main(["tune", str(out), "--json", "-"])
    tuned = json.loads(capsys.readouterr().out)
    assert tuned["trace"]["block_size"] == 16
    assert tuned["infinite_hit"]["tokens_cold"] > 0.5
    with pytest.raises(SystemExit):
        main(["trace", "info", str(out)])
    assert "16" in capsys.readouterr().out


def test_a_recording_that_misses_something_ends_with_1(world, run, out, monkeypatch):
    monkeypatch.setattr(world.services.recorder, "_max_queued_nbytes", 0)
    path = world.serve()
    real = Recording.run

    def asked_and_over(recording, for_s):
        world.services.recorder.knows(NAMESPACE.id, 16)
        world.services.recorder.see(protocol.Promote(1, 1, NAMESPACE.id, BLOCK, bytes(32)))
        real(recording, 0.0)

    monkeypatch.setattr(Recording, "run", asked_and_over)
    code, printed, _ = run("--socket", path, "--out", out)
    assert code == 1
    assert printed.startswith("0 prompts, 0 B, in ")
    assert "missing: 1 prompts came faster than they were written" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--socket", "/nowhere/x"), "no node runs at /nowhere/x; start one with"),
        (("--for", "soon"), "--for: 'soon' is not a quantity"),
        (("--for", "0"), "--for: must be more than 0 seconds"),
        (("--max-bytes", "lots"), "--max-bytes: 'lots' is not a quantity"),
        (("--out", "{tmp}/x.gz"), "not packed; choose a name without .gz"),
        (("--out", "{tmp}"), "is there already; name another file"),
        (("--out", "/proc/none/x"), "cannot be written: No such file"),
        (("--json", "/proc/none/x"), "cannot be written"),
    ],
)
def test_wrong_usage_ends_with_2(world, run, tmp_path, words, message):
    words = [word.format(tmp=tmp_path) for word in words]
    code, _, told = run("--socket", world.serve(), "--out", tmp_path / "o", *words)
    assert code == 2
    assert message in told
    assert not (tmp_path / "o").exists() or words[0] == "--json"


def test_a_node_that_does_not_record_is_told(tmp_path):
    path = tmp_path / "old.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(os.fspath(path))
        server.listen(1)

        def close_what_is_no_message():
            sock, _ = server.accept()
            with sock:
                sock.recv(4096)

        closing = threading.Thread(target=close_what_is_no_message)
        closing.start()
        with pytest.raises(ConfigError, match="of a release that does not record"):
            Recording(path, tmp_path / "o")
        closing.join()
    assert not (tmp_path / "o").exists()
