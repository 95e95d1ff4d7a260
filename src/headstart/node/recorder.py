"""What engines ask, kept for the one client that records it: see `headstart.node.recording`.

A look-up only puts what it asked into a queue. The client takes it over its own connection, and
makes and writes lines in its own process, so that nothing of that is on the node's threads. Where
it is slow, or its disk is, the queue is full and prompts are counted and forgotten.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from headstart.errors import ConfigError
from headstart.node.protocol import Promote, Prompt, Recorded
from headstart.types import KEY_NBYTES

_log = logging.getLogger(__name__)
MAX_QUEUED_NBYTES = 32 << 20
_PROMPT_NBYTES = 200
"""Of a prompt besides its keys."""
_MAX_TAKEN_NBYTES = 1 << 20
"""With one prompt more, which has at most half of a message. More would keep others waiting."""
_MAX_NAMESPACES = 4096


class Recorder:
    """See the module. Thread-safe."""

    def __init__(
        self,
        *,
        max_queued_nbytes: int = MAX_QUEUED_NBYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_queued_nbytes, self._clock = max_queued_nbytes, clock
        self._block_sizes: dict[bytes, int] = {}
        self._owner: object = None
        self._namespace = ""
        self._started = 0.0
        self._queue: deque[Prompt] = deque()
        self._queued_nbytes = self._num_lost = 0
        self._lock = threading.Lock()

    def knows(self, namespace: bytes, block_size: int) -> None:
        """Blocks of a namespace have so many tokens."""
        if len(self._block_sizes) < _MAX_NAMESPACES:
            self._block_sizes[namespace] = block_size

    def see(self, asked: Promote) -> None:
        """A prompt was looked up. Takes microseconds, and none while nobody records."""
        if self._owner is None or not asked.keys:
            return
        with self._lock:
            if self._owner is None or not asked.namespace.hex().startswith(self._namespace):
                return
            nbytes = len(asked.keys) + _PROMPT_NBYTES
            block_size = self._block_sizes.get(asked.namespace)
            if block_size is None or self._queued_nbytes + nbytes > self._max_queued_nbytes:
                self._num_lost += 1
                return
            num_tokens = len(asked.keys) // KEY_NBYTES * block_size
            if asked.asked is not None:
                num_tokens = asked.asked.num_tokens
            at_s = self._clock() - self._started
            self._queue.append(Prompt(at_s, block_size, num_tokens, asked.keys))
            self._queued_nbytes += nbytes

    def take(self, owner: object, namespace: str = "") -> Recorded:
        """What was asked since the last time, or some of it; the first time begins it.

        Only namespaces whose hex id starts so. Raises ConfigError while another client records.
        """
        with self._lock:
            if self._owner is None:
                self._owner, self._namespace = owner, namespace.lower()
                self._started, self._num_lost = self._clock(), 0
                _log.info("what engines ask is recorded from now on")
            elif self._owner is not owner:
                raise ConfigError("somebody records what this node is asked already; one can")
            taken: list[Prompt] = []
            taken_nbytes = 0
            while self._queue and taken_nbytes < _MAX_TAKEN_NBYTES:
                taken.append(self._queue.popleft())
                taken_nbytes += len(taken[-1].keys) + _PROMPT_NBYTES
            self._queued_nbytes -= taken_nbytes
            return Recorded(tuple(taken), self._num_lost)

    def stop(self, owner: object) -> None:
        """The client is gone, if it is the one that records."""
        with self._lock:
            if self._owner is not owner or owner is None:
                return
            self._owner = None
            self._queue.clear()
            self._queued_nbytes = 0
        _log.info("what engines ask is not recorded any more")
