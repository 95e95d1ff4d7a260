"""The board of a session: words in shared memory by which a poll costs no message.

Word n tells how a promotion goes, in 64 bits that are written at once:

    ticket, low 24 bits | phase, 8 bits | ready blocks, 32 bits

The scheduler gives a pending promotion a word of its own and reads it; only the node writes. A word
that carries another ticket is an old one: the promotion has not got that far. One more word, after
those, counts up while the node is alive.
"""

from __future__ import annotations

import enum
import mmap

from headstart.arena import sealed_memory
from headstart.node.protocol import NUM_WORDS

_NBYTES = (NUM_WORDS + 1) * 8
_TICKET_MASK = (1 << 24) - 1


class Phase(enum.IntEnum):
    """How far a promotion is."""

    WAITING = 0
    READING = 1
    DONE = 2


class Board:
    """One process's view of a board. It goes, with its memory, when nobody refers to it."""

    def __init__(self, fd: int) -> None:
        """Maps the board behind `fd`, which stays the caller's. Raises OSError or ValueError."""
        self._words = memoryview(mmap.mmap(fd, _NBYTES)).cast("Q")

    def write(self, word: int, ticket: int, phase: Phase, ready_blocks: int) -> None:
        """Tell how far `ticket` is."""
        self._words[word] = (ticket & _TICKET_MASK) << 40 | phase << 32 | ready_blocks

    def beat(self) -> None:
        """Show that the node is alive."""
        self._words[NUM_WORDS] += 1

    @property
    def num_beats(self) -> int:
        """Grows while the node is alive."""
        return self._words[NUM_WORDS]

    def read(self, word: int, ticket: int) -> tuple[Phase, int]:
        """How far `ticket` is: its phase and its ready blocks."""
        value = self._words[word]
        if value >> 40 != ticket & _TICKET_MASK:
            return Phase.WAITING, 0
        return Phase(min(value >> 32 & 0xFF, Phase.DONE)), value & 0xFFFFFFFF


def create_board() -> tuple[Board, int]:
    """A new board, all zero, and its descriptor, which is the caller's to send and to close."""
    fd = sealed_memory("headstart-board", _NBYTES)
    return Board(fd), fd
