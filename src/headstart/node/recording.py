"""Writes what a node is asked as a trace: `headstart node record`.

A line of JSON a prompt, as in Mooncake's traces, with the size of its blocks beside it:

    {"timestamp": 1250, "input_length": 41, "output_length": 0, "hash_ids": [...], "block_size": 16}

Milliseconds since the recording began; answers are not seen by the node, so their length is 0. An
id is a keyed hash of a block's key. The key is random, kept in memory only, and gone with this
process: which prompts begin alike is told, but not with what, nor whether a prompt that somebody
has was asked, nor what two recordings have in common.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from headstart.errors import ConfigError
from headstart.node import protocol
from headstart.types import KEY_NBYTES

_ANSWER_S = 10.0
_POLL_S = 0.2
_ID_NBYTES = 8
_ID_BITS = 53
"""Numbers that every reader of JSON keeps exact; two of ten million are alike in 1 of 180 cases."""
_MAX_TOKENS = 1 << 24
"""Of a prompt, as traces are read."""
_MUCH_NBYTES = 1 << 19
"""Where so much was taken at once, there is more."""
_DRAIN_S = 5.0
DEFAULT_MAX_NBYTES = 1 << 30


@dataclass(slots=True, kw_only=True)
class Written:
    """What a recording has come to."""

    num_prompts: int = 0
    nbytes: int = 0
    num_lost: int = 0
    """Prompts that the node had no room to keep until they were taken."""
    num_refused: int = 0
    """Prompts that could not be written."""
    problem: str = ""
    """Why the last of them could not."""
    is_full: bool = False
    """The file has the most bytes that it may have."""
    has_ended: bool = False
    """The node did."""


class Recording:
    """A file that is written, and the connection to the node. A context manager."""

    def __init__(
        self,
        path: Path,
        out: Path,
        *,
        namespace: str = "",
        max_nbytes: int = DEFAULT_MAX_NBYTES,
    ) -> None:
        """Begins at once. `path` is the node's socket; `out` must not be there yet.

        Only namespaces whose hex id starts with `namespace`. Raises ConfigError, ProtocolError, or
        an OSError of the socket.
        """
        if out.suffix == ".gz":
            raise ConfigError(
                f"--out {out}: lines are written as they come, not packed; choose a name without "
                ".gz, and pack it afterwards"
            )
        self.written = Written()
        self._salt = secrets.token_bytes(blake2b.MAX_KEY_SIZE)
        self._max_nbytes, self._namespace = max_nbytes, namespace
        self._file: int | None = None
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.settimeout(_ANSWER_S)
            self._sock.connect(os.fspath(path))
            self._take()  # before there is a file: the node may refuse
            self._file = _created(out)
        except BaseException:
            self._sock.close()
            raise

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def run(
        self,
        for_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Go on for so long, until the file is full, or the node ends; Ctrl-C is the caller's."""
        deadline = clock() + for_s
        while True:
            taken_nbytes = self.step()
            left_s = deadline - clock()
            is_drained = taken_nbytes < _MUCH_NBYTES
            if self.written.is_full or self.written.has_ended or left_s < -_DRAIN_S:
                return
            if is_drained and left_s <= 0.0:
                return
            if is_drained:
                sleep(min(_POLL_S, left_s))

    def step(self) -> int:
        """Write what was asked since; how many bytes of keys that was."""
        try:
            prompts = self._take()
        except (EOFError, OSError):
            self.written.has_ended = True
            return 0
        for prompt in prompts:
            if not self.written.is_full:
                self._write(prompt)
        return sum(len(prompt.keys) for prompt in prompts)

    def _take(self) -> tuple[protocol.Prompt, ...]:
        deadline = time.monotonic() + _ANSWER_S
        self._sock.sendall(protocol.pack(protocol.Record(self._namespace)))
        try:
            reply = protocol.unpack_reply(protocol.receive(self._sock, deadline))
        except EOFError as error:
            if self._file is not None:
                raise
            raise ConfigError(
                "the node closed the connection: it is of a release that does not record"
            ) from error
        if isinstance(reply, protocol.Failed):
            raise ConfigError(reply.message)
        if not isinstance(reply, protocol.Recorded):
            raise protocol.ProtocolError(f"{type(reply).__name__} is no answer")
        self.written.num_lost = reply.num_lost
        return reply.prompts

    def _write(self, prompt: protocol.Prompt) -> None:
        """A line, whole or not at all."""
        assert self._file is not None
        written = self.written
        if (len(prompt.keys) // KEY_NBYTES + 1) * prompt.block_size > _MAX_TOKENS:
            written.num_refused += 1
            written.problem = f"a prompt of over {_MAX_TOKENS:,} tokens"
            return
        line = msgspec.json.encode(self._line(prompt)) + b"\n"
        if written.nbytes + len(line) > self._max_nbytes:
            written.is_full = True
            return
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            written.num_refused += 1
            written.problem = error.strerror or str(error)
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, written.nbytes)
            return
        written.nbytes += len(line)
        written.num_prompts += 1

    def _line(self, prompt: protocol.Prompt) -> dict[str, object]:
        keys = memoryview(prompt.keys)
        ids = [
            self._id(keys[start : start + KEY_NBYTES]) for start in range(0, len(keys), KEY_NBYTES)
        ]
        # What engines say of a prompt's length may be anything; its blocks are what they are.
        least = len(ids) * prompt.block_size
        return {
            "timestamp": round(1000.0 * prompt.at_s),
            "input_length": min(max(prompt.num_tokens, least), least + prompt.block_size - 1),
            "output_length": 0,
            "hash_ids": ids,
            "block_size": prompt.block_size,
        }

    def _id(self, key: memoryview) -> int:
        salted = blake2b(key, digest_size=_ID_NBYTES, key=self._salt).digest()
        return int.from_bytes(salted) >> (8 * _ID_NBYTES - _ID_BITS)


def _created(out: Path) -> int:
    """A new file of this user's. Raises ConfigError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    except FileExistsError as error:
        raise ConfigError(
            f"--out {out} is there already; name another file: lines of two recordings have "
            "nothing in common"
        ) from error
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from error
