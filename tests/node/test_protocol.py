"""Messages and frames: what is sent arrives, and what is no message is told so, in time."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from typing import Annotated, get_args, get_origin

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headstart.node import protocol
from headstart.node.board import Board, Phase, create_board
from headstart.types import KEY_NBYTES, MAX_BLOCK_NBYTES

SOON = 20.0
VERSION = protocol.PROTOCOL_VERSION
int64 = st.integers(-(2**63), 2**64 - 1)
FIELDS = {
    int: int64,
    bytes: st.binary(max_size=200),
    bytes | None: st.none() | st.binary(max_size=40),
    str: st.text(max_size=50),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    tuple[bytes, ...]: st.lists(st.binary(max_size=20), max_size=5).map(tuple),
    tuple[int, ...]: st.lists(int64, max_size=20).map(tuple),
    dict[str, int]: st.dictionaries(st.text(max_size=9), int64, max_size=4),
    dict[str, object]: st.dictionaries(
        st.text(max_size=9), st.none() | int64 | st.text(max_size=9) | st.lists(int64), max_size=4
    ),
}


def values(kind):
    if kind in FIELDS:
        return FIELDS[kind]
    if get_origin(kind) is Annotated:
        (limits,) = kind.__metadata__
        return st.integers(limits.ge, limits.le)
    if get_origin(kind) is tuple:
        return st.lists(values(get_args(kind)[0]), max_size=3).map(tuple)
    if type(None) in get_args(kind):
        return st.none() | values(get_args(kind)[0])
    return messages(kind)


def messages(kind):
    fields = msgspec.structs.fields(kind)
    return st.builds(kind, **{field.name: values(field.type) for field in fields})


on_a_busy_machine = settings(suppress_health_check=[HealthCheck.too_slow])
REQUESTS = get_args(protocol.Request)
REPLIES = get_args(protocol.Reply)
any_request = st.one_of([messages(kind) for kind in REQUESTS])


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def soon():
    return time.monotonic() + SOON


@pytest.mark.parametrize("kind", REQUESTS)
@on_a_busy_machine
@given(data=st.data())
def test_every_request_arrives_as_it_was_sent(kind, data):
    message = data.draw(messages(kind))
    frame = protocol.pack(message)
    assert protocol.body_nbytes(frame[:12]) == len(frame) - 12
    assert protocol.unpack_request(frame[12:]) == message


@pytest.mark.parametrize("kind", REPLIES)
@on_a_busy_machine
@given(data=st.data())
def test_every_reply_arrives_as_it_was_sent(kind, data):
    message = data.draw(messages(kind))
    assert protocol.unpack_reply(protocol.pack(message)[12:]) == message


def test_what_has_no_reply_says_so():
    told = {kind for kind in REQUESTS if kind.is_told}
    names = {"Unclaim", "Release", "Commit", "Abandon", "Learnt", "Decided"}
    assert {kind.__name__ for kind in told} == names


@given(st.binary(max_size=300))
def test_garbage_is_no_message(garbage):
    for unpack in (protocol.unpack_request, protocol.unpack_reply):
        try:
            message = unpack(garbage)
        except protocol.ProtocolError:
            continue
        assert isinstance(message, (*REQUESTS, *REPLIES))


@on_a_busy_machine
@given(any_request, st.data())
def test_a_damaged_message_is_another_one_or_none(message, data):
    body = bytearray(protocol.pack(message)[12:])
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(body) - 1))
        body[position] = data.draw(st.integers(0, 255))
    for damaged in (body, body[: len(body) // 2], body + b"\0"):
        with contextlib.suppress(protocol.ProtocolError):
            protocol.unpack_request(damaged)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x91" * 100_000,  # a list in a list in a list ...
        b"\x81\xa1a" * 100_000,
        b"\x92\xa7verify\x91" * 1000,
        b"\xdd\xff\xff\xff\xff",  # 4 G of things are announced
        b"\xdf\xff\xff\xff\xff\xa1a",
        b"\x92\xa5claim\xc6\xff\xff\xff\xff",
        b"\x92\xa5claim\xcb" + struct.pack(">d", float("nan")),
        b"\x92\xa5claim\xa11",
        b"\x92\xa5claim",
        b"\x93\xa5claim\x01\x02",
        b"\x91\xa5clame",
        b"\x92\xa4open\xa2\xff\xfe",  # a string that is no UTF-8
        b"\x81\xa7claim\x01",
        b"\xc1",
    ],
)
def test_a_bomb_or_another_type_is_no_message(body):
    for unpack in (protocol.unpack_request, protocol.unpack_reply):
        with pytest.raises(protocol.ProtocolError):
            unpack(body)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (struct.pack("<4sBBHI", b"GET ", 1, 0, 0, 5), "does not speak"),
        (struct.pack("<4sBBHI", b"HSTN", 1, 0, 0, 5), "protocol version 1, not 3"),
        (struct.pack("<4sBBHI", b"HSTN", VERSION, 0, 0, (16 << 20) + 1), "is over 16777216"),
        (struct.pack("<4sBBHI", b"HSTN", VERSION, 0, 0, 2**32 - 1), "is over 16777216"),
    ],
)
def test_a_wrong_header_is_refused_with_the_reason(header, message):
    with pytest.raises(protocol.ProtocolError, match=message):
        protocol.body_nbytes(header)


def test_the_longest_message_is_the_longest():
    limit = protocol.MAX_MESSAGE_NBYTES
    longest = "x" * (limit - len(protocol.pack(protocol.OpenNamespace(""))) + 12 - 4)
    assert protocol.body_nbytes(protocol.pack(protocol.OpenNamespace(longest))[:12]) <= limit
    with pytest.raises(protocol.ProtocolError, match="over 16777216"):
        protocol.pack(protocol.OpenNamespace(longest + "12345"))


# ----------------------------------------------------------------------------------- keys and sizes


@given(st.lists(st.binary(min_size=KEY_NBYTES, max_size=KEY_NBYTES), max_size=9).map(tuple))
def test_keys_are_joined_and_split(keys):
    assert protocol.split_keys(protocol.join_keys(keys)) == keys


@pytest.mark.parametrize("nbytes", [1, 31, 33, (protocol.MAX_KEYS + 1) * KEY_NBYTES])
def test_what_are_no_keys_or_too_many_is_refused(nbytes):
    with pytest.raises(protocol.ProtocolError, match="are no keys"):
        protocol.split_keys(bytes(nbytes))


def test_as_many_keys_as_are_allowed_fit_a_message():
    keys = bytes(protocol.MAX_KEYS * KEY_NBYTES)
    assert len(protocol.split_keys(keys)) == protocol.MAX_KEYS
    assert protocol.pack(protocol.Promote(2**63, 2**12, bytes(32), MAX_BLOCK_NBYTES, keys))


# ------------------------------------------------------------------------------------------- frames


def test_a_frame_in_pieces_arrives(pair):
    ours, theirs = pair
    frame = protocol.pack(protocol.Claim(5))

    def send():
        for byte in frame:
            theirs.sendall(bytes([byte]))
            time.sleep(0.001)

    sender = threading.Thread(target=send)
    sender.start()
    assert protocol.unpack_request(protocol.receive(ours, soon())) == protocol.Claim(5)
    sender.join()


def test_two_frames_at_once_are_two(pair):
    ours, theirs = pair
    theirs.sendall(protocol.pack(protocol.Claim(1)) + protocol.pack(protocol.Claim(2)))
    for number in (1, 2):
        assert protocol.unpack_request(protocol.receive(ours, soon())) == protocol.Claim(number)


@pytest.mark.parametrize("kept", [0, 5, 12, 14])
def test_a_frame_that_is_cut_off_is_the_end(pair, kept):
    ours, theirs = pair
    theirs.sendall(protocol.pack(protocol.Claim(5))[:kept])
    theirs.close()
    with pytest.raises(EOFError, match="has closed"):
        protocol.receive(ours, soon())


@pytest.mark.parametrize("kept", [0, 5, 14])
def test_half_a_frame_is_waited_for_until_the_deadline(pair, kept):
    ours, theirs = pair
    theirs.sendall(protocol.pack(protocol.Claim(5))[:kept])
    with pytest.raises(TimeoutError):
        protocol.receive(ours, time.monotonic() + 0.05)


def test_a_dripping_sender_does_not_move_the_deadline(pair):
    """It sends a byte in time, again and again."""
    ours, theirs = pair
    theirs.sendall(struct.pack("<4sBBHI", b"HSTN", VERSION, 0, 0, 10_000))
    ended = threading.Event()

    def drip():
        while not ended.wait(0.01):
            theirs.sendall(b"x")

    sender = threading.Thread(target=drip)
    sender.start()
    try:
        with pytest.raises(TimeoutError):
            protocol.receive(ours, time.monotonic() + 0.2)
    finally:
        ended.set()
        sender.join()


# -------------------------------------------------------------------------------------------- board

words = st.integers(0, protocol.NUM_WORDS - 1)


@given(words, int64, st.sampled_from(Phase), st.integers(0, protocol.MAX_KEYS))
def test_a_word_is_read_as_it_was_written(word, ticket, phase, ready):
    board, theirs = BOARDS
    assert theirs.read(word, ticket + 1) == (Phase.WAITING, 0)
    board.write(word, ticket, phase, ready)
    assert theirs.read(word, ticket) == (phase, ready)
    assert theirs.read(word, ticket + 1) == (Phase.WAITING, 0)
    board.write(word, 0, Phase.WAITING, 0)


def _two_views():
    board, fd = create_board()
    theirs = Board(fd)
    os.close(fd)
    return board, theirs


BOARDS = _two_views()
