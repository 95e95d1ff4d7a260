"""A worker's view of the node's arena."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from headstart.errors import HeadstartError
from headstart.node import protocol

_log = logging.getLogger(__name__)
_MAP_POPULATE = 0x8000  # mman.h: page tables now, not a fault at each page's first use


class ArenaMapping:
    """A worker's view of a node's arena, and the open connection by which the node knows of it."""

    def __init__(
        self,
        path: Path,
        *,
        timeout_s: float = 1.0,
        retry_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Maps nothing yet: `attach` and `follow` do; after a failure not again for `retry_s`."""
        self.token = secrets.token_bytes(protocol.TOKEN_NBYTES)
        self.boot = b""
        self._sock: socket.socket | None = None
        self._map: mmap.mmap | None = None
        self._path, self._timeout_s = path, timeout_s
        self._retry_s, self._clock, self._not_before = retry_s, clock, float("-inf")

    @property
    def memory(self) -> memoryview:
        """All of the arena, writable; empty when none is mapped."""
        return memoryview(b"" if self._map is None else self._map)

    def follow(self, boot: bytes) -> bool:
        """Map the arena of the node's run `boot`, if it is not; whether it is mapped now."""
        if not boot:
            return False
        return boot == self.boot or (self.attach() and boot == self.boot)

    def attach(self) -> bool:
        """Map the node's arena, as it is now. An earlier one's memory goes with its last view."""
        if self._clock() < self._not_before:
            return False
        try:
            now, sock, mapped = self._attach(self._path, self.token, self._timeout_s)
        except (OSError, EOFError, ValueError, HeadstartError) as error:
            _log.warning("the memory of the node at %s cannot be mapped: %s", self._path, error)
            self._not_before = self._clock() + self._retry_s
            return False
        self.close()
        self.boot, self._sock, self._map = now, sock, mapped
        return True

    def close(self) -> None:
        """Give the mapping up. Views must be gone before, or the node is told too early."""
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
        if self._sock is not None:
            self._sock.close()
        self.boot, self._sock, self._map = b"", None, None

    @staticmethod
    def _attach(
        path: Path, token: bytes, timeout_s: float
    ) -> tuple[bytes, socket.socket, mmap.mmap]:
        fds: list[int] = []
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(os.fspath(path))
            attach = protocol.pack(protocol.Attach(token))
            sock.sendall(attach)
            deadline = time.monotonic() + timeout_s
            welcome = protocol.unpack_reply(protocol.receive(sock, deadline, fds))
            if not isinstance(welcome, protocol.Welcome) or len(fds) != 1:
                raise protocol.ProtocolError("the node gave no memory")
            flags = mmap.MAP_SHARED | _MAP_POPULATE
            mapped = mmap.mmap(fds[0], welcome.nbytes, flags=flags)
            sock.sendall(attach)  # mapped
            protocol.receive(sock, time.monotonic() + timeout_s)  # and known of: it may be used
        except BaseException:
            sock.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        return welcome.boot, sock, mapped
