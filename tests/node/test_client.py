"""The engine's side: bounded waits, words and tickets that come back, answers that are nonsense."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from headstart.keys import BlockLayout, Namespace, keys_from_hashes
from headstart.node import protocol
from headstart.node.board import create_board
from headstart.node.client import ClientLimits, NodeClient, command
from headstart.node.mapping import ArenaMapping

SOON = 20.0
MARGIN_S = 5.0
BLOCK = 64 << 10
LAYOUT = BlockLayout(block_size=16, axes="byte", shape=(BLOCK,), dtype="uint8")
NAMESPACE = Namespace(model="node", weights="none", layout=LAYOUT)
LIMITS = ClientLimits(ask_s=0.2, open_s=0.3, retry_s=1.0, max_retry_s=4.0)
WELCOME = protocol.Welcome(b"b" * 16, 0)


def chain(path, namespace=NAMESPACE):
    return keys_from_hashes(namespace, [str(content).encode() for content in path])


class Script:
    """A node that gives prepared answers, one a request; None: no answer, bytes: as they are."""

    def __init__(self, path):
        self.path, self.requests, self.answers = path, [], []
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(os.fspath(path))
        self._server.listen(16)
        self._socks = []
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            self._socks.append(sock)
            with contextlib.suppress(EOFError, OSError, protocol.ProtocolError):
                self._serve(sock)

    def _serve(self, sock):
        while True:
            request = protocol.unpack_request(protocol.receive(sock, None))
            self.requests.append(request)
            if request.is_told:
                continue
            answer = self.answers.pop(0) if self.answers else None
            if answer == "close":
                sock.close()
                return
            if answer is None:
                continue
            frame = answer if isinstance(answer, bytes) else protocol.pack(answer)
            if isinstance(answer, protocol.Welcome):
                _, fd = create_board()
                socket.send_fds(sock, [frame], [fd])
                os.close(fd)
            else:
                sock.sendall(frame)

    def close(self):
        for sock in (self._server, *self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self.thread.join(SOON)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def script(tmp_path):
    script = Script(tmp_path / "script.sock")
    yield script
    script.close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def impatient(script, clock):
    """A client of the script whose time for retries is `clock`'s."""
    client = NodeClient(script.path, (), limits=LIMITS, clock=clock)
    client.open_namespace(NAMESPACE)
    yield client
    client.close()


def promoted(num_held=2, num_ready=2, pending=False):
    return protocol.Promoted(num_held, num_ready, pending=pending)


def timed(function, *args):
    started = time.monotonic()
    result = function(*args)
    return result, time.monotonic() - started


# --------------------------------------------------------------------------------- one conversation


def test_the_first_question_connects_and_opens_the_namespace_once(script, impatient):
    script.answers = [WELCOME, protocol.Opened(), promoted(), promoted()]
    assert impatient.promote(chain("ab")).num_held == 2
    assert impatient.promote(chain("ab")).num_held == 2
    kinds = [type(request).__name__ for request in script.requests]
    assert kinds == ["Hello", "OpenNamespace", "Promote", "Promote"]
    assert impatient.boot == WELCOME.boot


def test_the_same_node_knows_the_namespace_still_and_another_does_not(script, impatient, clock):
    other = protocol.Welcome(b"c" * 16, 0)
    opened = protocol.Opened()
    script.answers = [WELCOME, opened, "close", WELCOME, "close", other, opened, promoted()]
    for seconds in (0, 10, 20):
        clock.now = seconds
        promise = impatient.promote(chain("ab"))
    assert promise.num_held == 2
    kinds = [type(request).__name__[:2] for request in script.requests]
    assert kinds == ["He", "Op", "Pr", "He", "Pr", "He", "Op", "Pr"]


def test_coming_back_names_what_workers_hold(script, impatient, clock):
    reserved = protocol.Reserved(0, (0, BLOCK))
    claimed = protocol.Claimed((0,), {"memory": 1}, 0.0)
    script.answers = [WELCOME, protocol.Opened(), promoted(), claimed, promoted(), claimed]
    script.answers += [reserved, reserved, protocol.Reserved(0, ()), None, WELCOME]
    kept = impatient.promote(chain("ab"))
    kept.claim()
    given_back = impatient.promote(chain("ab"))
    given_back.claim()
    first, _ = impatient.reserve(chain("cd"))
    second, _ = impatient.reserve(chain("ef"))
    impatient.reserve(chain("gh"))
    given_back.unclaim()
    impatient.commit(second)
    assert impatient.promote(chain("x")) is None
    clock.now = 10
    assert impatient.connect()
    hello = script.requests[-1]
    assert sorted(hello.claims) == sorted([kept.ticket, first])
    assert hello.session == script.requests[0].session


# --------------------------------------------------------------------------- waits, and how many


def test_no_node_is_a_miss_at_once(tmp_path, clock, caplog):
    client = NodeClient(tmp_path / "none.sock", (), limits=LIMITS, clock=clock)
    client.open_namespace(NAMESPACE)
    for _ in range(5):
        (answer, other), seconds = timed(
            lambda: (client.promote(chain("ab")), client.reserve(chain("ab")))
        )
        assert (answer, other) == (None, None)
        assert seconds < MARGIN_S
        client.commit(1)
        client.abandon(2)
    assert client.num_failures == 1, "only the first was tried: a second has to pass"
    assert len(caplog.records) == 1


@pytest.mark.parametrize("when", ["hello", "open"])
def test_a_silent_node_costs_one_wait_then_less_and_less_often(script, impatient, clock, when):
    tried = []
    for clock.now in range(20):
        num_failures = impatient.num_failures
        script.answers = [WELCOME] if when == "open" else []
        answer, seconds = timed(impatient.promote, chain("ab"))
        assert answer is None
        assert seconds < 0.7 + MARGIN_S
        if impatient.num_failures > num_failures:
            tried.append(clock.now)
            assert seconds > 0.15
        else:
            assert seconds < 0.15, "nothing waits"
    assert tried == [0, 1, 3, 7, 11, 15, 19], "1, 2, and then 4 seconds between"


def test_an_answer_ends_the_back_off(script, impatient, clock):
    for clock.now in (0, 1, 3):
        assert not impatient.connect()
    script.answers = [WELCOME, protocol.Opened(), promoted(), None]
    clock.now = 7
    assert impatient.promote(chain("ab")).num_held == 2
    assert impatient.promote(chain("ab")) is None
    script.answers = [WELCOME]
    clock.now = 8
    assert impatient.connect(), "one second again"


def test_a_node_that_drips_its_answer_is_waited_for_once(script, impatient, clock):
    frame = protocol.pack(promoted())
    script.answers = [WELCOME, protocol.Opened(), frame[:15]]
    answer, seconds = timed(impatient.promote, chain("ab"))
    assert answer is None
    assert seconds < 0.2 + MARGIN_S


@pytest.fixture
def patient(script, clock):
    """A client of the script that waits for answers on a busy machine, too."""
    client = NodeClient(script.path, (), limits=ClientLimits(ask_s=SOON), clock=clock)
    client.open_namespace(NAMESPACE)
    yield client
    client.close()


def test_a_look_up_that_takes_too_long_is_a_miss_and_what_it_gives_is_given_back(script, patient):
    script.answers = [WELCOME, protocol.Opened(), promoted(), None, promoted(num_held=1)]
    assert patient.promote(chain("ab"), budget_s=SOON).num_held == 2
    promise = patient.promote(chain("ab"), budget_s=0.005)
    assert promise.is_late
    assert (promise.num_held, promise.ticket, promise.poll()) == (0, None, (True, 0))
    asked = 4
    while len(script.requests) < asked:
        time.sleep(0.001)
    assert patient.promote(chain("ab"), budget_s=0.005).is_late
    assert len(script.requests) == asked, "one at a time: the next answer would be taken for it"
    script._socks[-1].sendall(protocol.pack(promoted(pending=True, num_ready=0)))
    promise = patient.promote(chain("ab"), budget_s=SOON)
    assert (promise.num_held, promise.is_late, patient.num_failures) == (1, False, 0)
    released, promote = script.requests[-2:]
    assert isinstance(released, protocol.Release)
    assert released.ticket == script.requests[asked - 1].ticket
    assert isinstance(promote, protocol.Promote)


def test_another_question_waits_for_the_answer_that_was_not_waited_for(script, patient):
    script.answers = [WELCOME, protocol.Opened(), None, protocol.Reserved(1, ())]
    assert patient.promote(chain("ab"), budget_s=0.001).is_late
    script._socks[-1].sendall(protocol.pack(promoted(num_held=0, num_ready=0)))
    assert patient.reserve(chain("ab"))[1].num_held == 1
    assert len(patient._free_words) == protocol.NUM_WORDS


def test_another_question_waits_no_longer_than_for_its_own_answer(script, impatient):
    script.answers = [WELCOME, protocol.Opened(), None]
    assert impatient.promote(chain("ab"), budget_s=0.001).is_late
    answer, seconds = timed(impatient.reserve, chain("ab"))
    assert answer is None
    assert seconds < LIMITS.ask_s + MARGIN_S
    assert impatient.num_failures == 1


def test_a_node_that_hangs_costs_look_ups_one_wait_and_not_one_each(script, impatient):
    script.answers = [WELCOME, protocol.Opened(), None]
    assert impatient.promote(chain("ab"), budget_s=0.05).is_late
    answers, seconds = timed(
        lambda: [impatient.promote(chain("ab"), budget_s=0.05) for _ in range(50)]
    )
    assert all(each is None or each.is_late for each in answers)
    assert seconds < 0.05 * 50 / 2
    time.sleep(LIMITS.ask_s)
    assert impatient.promote(chain("ab"), budget_s=0.05) is None
    assert impatient.num_failures == 1, "now it is left alone"


def test_a_budget_is_never_longer_than_any_question_may_take(script, impatient):
    script.answers = [WELCOME, protocol.Opened(), None]
    promise, seconds = timed(lambda: impatient.promote(chain("ab"), budget_s=60.0))
    assert promise.is_late
    assert seconds < LIMITS.ask_s + MARGIN_S


def test_a_node_that_ends_after_the_answer_that_was_not_waited_for(script, impatient):
    script.answers = [WELCOME, protocol.Opened(), None]
    assert impatient.promote(chain("ab"), budget_s=0.001).is_late
    script._socks[-1].sendall(protocol.pack(promoted(pending=True, num_ready=0)))
    script._socks[-1].shutdown(socket.SHUT_RDWR)
    assert impatient.promote(chain("ab"), budget_s=0.05) is None


NONSENSE = {
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "no message": protocol.pack(promoted())[:12] + b"\xff" * 20,
    "another answer": protocol.pack(protocol.Done("done")),
    "twice": protocol.pack(promoted()) * 2,
    "a welcome": protocol.pack(WELCOME),
    "a request": protocol.pack(protocol.Status()),
    "version": b"HSTN\x01\0\0\0\x01\0\0\0\0",
    "4 GiB": b"HSTN\x02\0\0\0\xff\xff\xff\xff",
    "nothing": "close",
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_a_miss_and_ends_the_connection(script, impatient, clock, name):
    script.answers = [WELCOME, protocol.Opened(), NONSENSE[name]]
    assert impatient.promote(chain("ab")) is None
    assert impatient.num_failures == 1
    script.answers = [WELCOME, promoted()]
    clock.now = 5
    assert impatient.promote(chain("ab")).num_held == 2


@pytest.mark.parametrize(
    "welcome",
    [protocol.Opened(), protocol.pack(WELCOME), "close", b"x" * 40],
    ids=["another", "no board", "closed", "garbage"],
)
def test_a_welcome_without_a_board_is_none(script, impatient, welcome):
    script.answers = [welcome]
    assert not impatient.connect()
    assert impatient.num_failures == 1


# -------------------------------------------------------------------------------- words and tickets


def test_words_of_refused_and_empty_promotions_come_back(script, impatient, caplog):
    caplog.set_level(logging.INFO)
    script.answers = [WELCOME, protocol.Opened()]
    script.answers += [protocol.Failed("no room")] * 50 + [promoted(2, 0)] * 50
    for number in range(100):
        promise = impatient.promote(chain("ab"))
        assert (promise is None) == (number < 50)
    assert len(impatient._free_words) == protocol.NUM_WORDS
    assert impatient.num_failures == 0
    assert caplog.text.count("the node refused Promote: no room") == 1, "once, not once a request"


def test_without_a_free_word_there_is_no_promotion(script, impatient):
    script.answers = [WELCOME, protocol.Opened(), *[promoted(pending=True)] * protocol.NUM_WORDS]
    promises = [impatient.promote(chain("ab")) for _ in range(protocol.NUM_WORDS)]
    assert all(promises)
    assert len({promise._word for promise in promises}) == protocol.NUM_WORDS
    assert impatient.promote(chain("ab")) is None
    promises[7].release()
    script.answers = [promoted(pending=True)]
    assert impatient.promote(chain("ab"))._word == promises[7]._word


def test_a_promise_of_a_lost_connection_is_a_miss(script, impatient, clock):
    script.answers = [WELCOME, protocol.Opened(), promoted(), promoted(pending=True), None]
    ready, pending = impatient.promote(chain("ab")), impatient.promote(chain("cd"))
    assert (ready.poll(), pending.poll()) == ((True, 2), (False, 0))
    assert impatient.promote(chain("ef")) is None
    for promise in (ready, pending):
        assert promise.poll() == (True, 0)
        assert promise.claim() is None
    script.answers = [WELCOME, promoted(pending=True)]
    clock.now = 5
    again = impatient.promote(chain("ab"))
    pending.release()
    ready.release()
    assert again._word in range(protocol.NUM_WORDS)
    assert len(impatient._free_words) == protocol.NUM_WORDS - 1, "theirs were another board's"
    assert len({again.ticket, pending.ticket, ready.ticket}) == 2, "both are released: None"


def test_tickets_are_never_used_twice(script, impatient, clock):
    script.answers = [WELCOME, protocol.Opened(), promoted(), protocol.Reserved(0, (0,)), "close"]
    impatient.promote(chain("ab"))
    impatient.reserve(chain("ab"))
    impatient.promote(chain("ab"))
    script.answers = [WELCOME, promoted(), protocol.Reserved(0, (0,))]
    clock.now = 5
    impatient.promote(chain("ab"))
    impatient.reserve(chain("ab"))
    tickets = [request.ticket for request in script.requests if hasattr(request, "ticket")]
    assert len(tickets) == len(set(tickets)) == 5


# ---------------------------------------------------------------------------- mappings and commands


def test_an_arena_that_does_not_come_is_none(script, tmp_path):
    mapping = ArenaMapping(script.path, timeout_s=0.2, retry_s=0.0)
    for answer in (None, protocol.Failed("no"), protocol.pack(WELCOME), b"x" * 40, "close"):
        script.answers = [answer]
        result, seconds = timed(mapping.attach)
        assert result is False
        assert seconds < 1 + MARGIN_S
    assert (mapping.boot, len(mapping.memory)) == (b"", 0)
    mapping.close()
    nowhere = ArenaMapping(tmp_path / "none.sock")
    assert not nowhere.attach()
    nowhere.close()


def test_a_mapping_is_all_of_the_arena(world, mappings):
    mapping = mappings(world.serve())
    assert len(mapping.memory) == world.memory.arena.nbytes
    world.memory.view(BLOCK, BLOCK)[:] = b"7" * BLOCK
    assert bytes(mapping.memory[BLOCK : 2 * BLOCK]) == b"7" * BLOCK
    mapping.memory[:5] = b"hello"
    assert bytes(world.memory.view(0, 5)[:5]) == b"hello"
    assert mapping.boot == world.services.boot
    assert mapping.attach(), "again: the old connection goes"
    mapping.close()
    mapping.close()


def test_a_mapping_that_is_there_is_known_to_the_node(world, mappings):
    """Else the first request after it would be a miss, if the node is busy."""
    known = world.sessions.attach
    world.sessions.attach = lambda token: (time.sleep(0.05), known(token))
    for count in range(1, 6):
        mappings(world.serve())
        assert world.counts(workers=count)


def test_a_command_to_what_is_no_node_is_an_error(script, tmp_path):
    script.answers = ["close"]
    with pytest.raises(protocol.ProtocolError, match="closed the connection"):
        command(script.path, protocol.Status(), SOON)
    script.answers = [b"HTTP/1.1 400 Bad Request"]
    with pytest.raises(protocol.ProtocolError, match="does not speak"):
        command(script.path, protocol.Status(), SOON)
    script.answers = [None]
    with pytest.raises(TimeoutError):
        command(script.path, protocol.Status(), 0.1)
    with pytest.raises(FileNotFoundError):
        command(tmp_path / "none.sock", protocol.Status(), SOON)


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_are_not_lost(world, clients, mappings, soon):
    world.serve()
    before = num_descriptors()
    for _ in range(10):
        client, mapping = clients(world.path), mappings(world.path)
        assert client.connect()
        client.close()
        mapping.close()
    soon(lambda: world.counts())
    soon(lambda: num_descriptors() == before, "an end of their descriptors")
