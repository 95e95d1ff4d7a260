"""What an engine and the node say to each other over the Unix socket.

A frame is 12 bytes of header, `magic "HSTN", version, flags 0, length` little-endian, and one
MessagePack message of at most `MAX_MESSAGE_NBYTES`. The first message of a connection says who the
client is:

    Hello     a scheduler: one a process; answered by `Welcome` with the board's descriptor
    Attach    a worker: answered by `Welcome` with the arena's descriptor; nothing is said after it,
              the open connection is the proof that the worker lives
    anything  of `headstart node`'s commands: Status, Stop, Clear, Verify, Record

Requests are answered in order, one reply each; those with `is_told` have none. A ticket is a number
that the scheduler chooses for a lease (`Promote`) or a reservation (`Reserve`); it is never used
twice in a session.

Nothing here is trusted: a frame of another magic, version or length, or a message that does not
decode to its type, closes the connection it came from.
"""

from __future__ import annotations

import socket
import struct
import time

import msgspec

from headstart.errors import HeadstartError
from headstart.node.planning import Asked as Asked
from headstart.node.planning import Costs as Costs
from headstart.node.planning import Decided as Decided
from headstart.node.planning import Learnt as Learnt
from headstart.node.planning import Message as _Message
from headstart.node.planning import Planned as Planned
from headstart.types import KEY_NBYTES, BlockKey

PROTOCOL_VERSION = 3
MAX_MESSAGE_NBYTES = 16 << 20
MAX_KEYS = MAX_MESSAGE_NBYTES // KEY_NBYTES // 2
MAX_WORKERS = 1024
NUM_WORDS = 4096
"""Completion words of a session's board: the promotions that can be pending at once."""
TOKEN_NBYTES = 16

_HEADER = struct.Struct("<4sBBHI")
_MAGIC = b"HSTN"
_REPLY_NBYTES = 1 << 16


class ProtocolError(HeadstartError):
    """The other side sent something that is no message."""


class Hello(_Message, frozen=True, tag="hello"):
    """A scheduler opens its session, or comes back to it after it lost the connection."""

    session: bytes
    workers: tuple[bytes, ...]
    """Tokens of the workers that will copy, one a rank, in order of rank."""
    claims: tuple[int, ...] = ()
    """Tickets that workers still hold; every other ticket of the session is given back."""


class Attach(_Message, frozen=True, tag="attach"):
    """A worker wants the arena, and says so again when it has mapped it. Both are answered."""

    worker: bytes


class OpenNamespace(_Message, frozen=True, tag="open"):
    """Make a namespace known; `text` is `Namespace.to_json()`."""

    text: str


class Promote(_Message, frozen=True, tag="promote"):
    """Bring the held prefix of these blocks into the arena; tell progress in word `word`.

    All of it, or, if something is `asked`, as much as the node plans.
    """

    ticket: int
    word: int
    namespace: bytes
    block_nbytes: int
    keys: bytes
    """`KEY_NBYTES` a block, in prompt order from the prompt's start."""
    asked: Asked | None = None


class Claim(_Message, frozen=True, tag="claim"):
    """A worker will be given the addresses of the ready blocks of a ticket."""

    ticket: int


class Unclaim(_Message, frozen=True, tag="unclaim"):
    """No worker was given anything of the ticket: it may expire again."""

    is_told = True
    ticket: int


class Release(_Message, frozen=True, tag="release"):
    """Nobody needs the ticket any more; no worker holds an address of it."""

    is_told = True
    ticket: int


class Reserve(_Message, frozen=True, tag="reserve"):
    """Slots for new blocks that workers will fill; claimed from the start."""

    ticket: int
    namespace: bytes
    block_nbytes: int
    keys: bytes
    parent: bytes | None


class Commit(_Message, frozen=True, tag="commit"):
    """All workers have filled all slots of a reservation."""

    is_told = True
    ticket: int


class Abandon(_Message, frozen=True, tag="abandon"):
    """The slots of a reservation hold nothing, and no worker holds an address of them."""

    is_told = True
    ticket: int


class Decisions(_Message, frozen=True, tag="decisions"):
    """Ask for what was decided after the record with this number."""

    after: int = 0


class Record(_Message, frozen=True, tag="record"):
    """Ask for the prompts that were looked up since this connection said so last.

    The first time begins it, the end of the connection ends it. Of namespaces whose hex id starts
    so.
    """

    namespace: str = ""


class Status(_Message, frozen=True, tag="status"):
    """Ask for the node's state."""


class Stop(_Message, frozen=True, tag="stop"):
    """Write what is queued, for at most `timeout_s`, and end."""

    timeout_s: float = 30.0


class Clear(_Message, frozen=True, tag="clear"):
    """Forget all blocks, or those of one namespace (hex of its id, or its first digits)."""

    namespace: str = ""


class Verify(_Message, frozen=True, tag="verify"):
    """Read every block of every tier and drop what is damaged."""


class Welcome(_Message, frozen=True, tag="welcome"):
    """The session is open; a descriptor of the arena or the board comes with it."""

    boot: bytes
    """Random number of this run of the node: slots of another run mean nothing."""
    nbytes: int
    """Length of the arena; 0 for a scheduler, which does not map it."""


class Opened(_Message, frozen=True, tag="opened"):
    """The namespace is known, and perhaps what an engine that had it learnt of its costs."""

    costs: Costs | None = None


class Promoted(_Message, frozen=True, tag="promoted"):
    """What is held of a prompt; `pending` while some of it is being read."""

    num_held: int
    num_ready: int
    pending: bool
    by_tier: dict[str, int] = msgspec.field(default_factory=dict)
    """Blocks at the start of the prompt that each tier holds."""
    plan: Planned | None = None
    """What is loaded of it; None: all, nothing was asked."""


class Claimed(_Message, frozen=True, tag="claimed"):
    """Where the ready blocks lie in the arena; none when nothing is ready, or it has expired."""

    offsets: tuple[int, ...]
    by_tier: dict[str, int]
    read_s: float
    attached: bool = True
    """False: some worker does not map the arena, so nothing was claimed."""


class Reserved(_Message, frozen=True, tag="reserved"):
    """Where to write the blocks after those that are held; fewer slots when memory is full."""

    num_held: int
    offsets: tuple[int, ...]
    is_orphan: bool = False
    """No tier holds the parent: nothing could ever reach these blocks."""


class Prompt(_Message, frozen=True):
    """What was looked up, `at_s` seconds after the recording began."""

    at_s: float
    block_size: int
    num_tokens: int
    """Those of its blocks, where nothing was `asked`."""
    keys: bytes


class Recorded(_Message, frozen=True, tag="recorded"):
    """Prompts in the order of their look-ups, and how many in all there was no room for."""

    prompts: tuple[Prompt, ...]
    num_lost: int


class State(_Message, frozen=True, tag="state"):
    """The node's state as JSON-able values."""

    fields: dict[str, object]


class Done(_Message, frozen=True, tag="done"):
    """A command was carried out."""

    message: str


class Failed(_Message, frozen=True, tag="failed"):
    """The request was refused; the connection goes on."""

    message: str


Request = (
    Hello
    | Attach
    | OpenNamespace
    | Promote
    | Claim
    | Unclaim
    | Release
    | Reserve
    | Commit
    | Abandon
    | Learnt
    | Decided
    | Decisions
    | Record
    | Status
    | Stop
    | Clear
    | Verify
)
Reply = Welcome | Opened | Promoted | Claimed | Reserved | Recorded | State | Done | Failed

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


def pack(message: Request | Reply) -> bytes:
    """A message as a frame. Raises ProtocolError when it is too long to be sent."""
    body = _encode(message)
    if len(body) > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"a message of {len(body)} bytes is over {MAX_MESSAGE_NBYTES}")
    return _HEADER.pack(_MAGIC, PROTOCOL_VERSION, 0, 0, len(body)) + body


def unpack_request(body: bytes | bytearray) -> Request:
    """The request in a frame's body. Raises ProtocolError."""
    try:
        return _decode_request(body)
    except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        raise ProtocolError(f"no request: {error}") from error


def unpack_reply(body: bytes | bytearray) -> Reply:
    """The reply in a frame's body. Raises ProtocolError."""
    try:
        return _decode_reply(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"no reply: {error}") from error


def body_nbytes(header: bytes | bytearray) -> int:
    """Length of the body that follows a header. Raises ProtocolError."""
    magic, version, _, _, nbytes = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise ProtocolError("the other side does not speak Headstart's protocol")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"protocol version {version}, not {PROTOCOL_VERSION}: engine and node come from "
            "different releases; stop the node with `headstart node stop`"
        )
    if nbytes > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"a message of {nbytes} bytes is over {MAX_MESSAGE_NBYTES}")
    return int(nbytes)


def receive(sock: socket.socket, deadline: float | None, fds: list[int] | None = None) -> bytearray:
    """The body of the next frame; `fds` takes descriptors that come with it.

    `deadline` by `time.monotonic()`, for the whole frame. Raises ProtocolError for garbage,
    EOFError when the other side has closed, TimeoutError, or another OSError.
    """
    header = _exactly(sock, _HEADER.size, deadline, fds)
    return _exactly(sock, body_nbytes(header), deadline, None)


def receive_reply(sock: socket.socket, deadline: float) -> Reply:
    """The reply to the only request that is under way: most of them take one system call.

    `deadline` by `time.monotonic()`; `sock` has a time-out already. Raises as `receive` does.
    """
    data = sock.recv(_REPLY_NBYTES)
    if len(data) < _HEADER.size:
        if not data:
            raise EOFError("the other side has closed the connection")
        data += _exactly(sock, _HEADER.size - len(data), deadline, None)
    missing = _HEADER.size + body_nbytes(data[: _HEADER.size]) - len(data)
    if missing < 0:
        raise ProtocolError("more than a reply came")
    if missing:
        data += _exactly(sock, missing, deadline, None)
    return unpack_reply(data[_HEADER.size :])


def _exactly(
    sock: socket.socket, nbytes: int, deadline: float | None, fds: list[int] | None
) -> bytearray:
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the other side does not answer")
            sock.settimeout(left_s)
        if fds is None:
            count = sock.recv_into(view)
        else:
            piece, received, _, _ = socket.recv_fds(sock, len(view), 4)
            fds += received
            count = len(piece)
            view[:count] = piece
        if count == 0:
            raise EOFError("the other side has closed the connection")
        view = view[count:]
    return data


def join_keys(keys: tuple[BlockKey, ...]) -> bytes:
    """Keys as a message carries them."""
    return b"".join(keys)


def split_keys(joined: bytes) -> tuple[BlockKey, ...]:
    """The keys of a message. Raises ProtocolError."""
    if len(joined) % KEY_NBYTES or len(joined) > MAX_KEYS * KEY_NBYTES:
        raise ProtocolError(f"{len(joined)} bytes are no keys, or too many")
    return tuple(
        BlockKey(joined[start : start + KEY_NBYTES]) for start in range(0, len(joined), KEY_NBYTES)
    )
