"""What a node has promised to bring into memory for a prompt, as its scheduler sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headstart.node import protocol
from headstart.node.board import Phase

if TYPE_CHECKING:
    from headstart.node.client import NodeClient

LATE = protocol.Promoted(0, 0, pending=False, by_tier={})
"""Stands for an answer that was not waited for."""


class Promise:
    """A promotion as its scheduler sees it. Ends with `release()`."""

    def __init__(
        self,
        client: NodeClient,
        ticket: int | None,
        word: int,
        reply: protocol.Promoted,
    ) -> None:
        """While `reply` is pending, the board's word `word` tells how far it is."""
        self._client, self._word = client, word
        self.ticket = ticket
        """The number that workers acknowledge; None: nothing is held."""
        self._board = client._board
        self._num_ready = None if reply.pending else reply.num_ready
        self.num_held = reply.num_held
        """Blocks that some tier holds."""
        self.by_tier, self.plan = reply.by_tier, reply.plan
        self.is_late = reply is LATE
        """Whether its look-up took too long: nothing is known, and nothing promised."""

    @property
    def num_planned(self) -> int:
        """Blocks that are promoted."""
        return self.num_held if self.plan is None else self.plan.num_blocks

    @property
    def num_kept(self) -> int:
        """Blocks that are in memory, or will be: what lies behind is worth storing again."""
        if self.plan is None or self.plan.num_blocks == self.num_held:
            return self.num_held
        return max(self.plan.num_blocks, self.by_tier.get("memory", 0))

    def poll(self) -> tuple[bool, int]:
        """Whether it is over, and the blocks that are ready. Costs no message."""
        if self.ticket is None or self._board is None or self._client._board is not self._board:
            return True, 0  # the connection was lost: so was the ticket
        if self._num_ready is not None:
            return True, self._num_ready
        phase, ready = self._board.read(self._word, self.ticket)
        if phase is Phase.DONE:
            self._num_ready = ready
        return phase is Phase.DONE, ready

    @property
    def pulse(self) -> int:
        """A number that changes while a living node has the promotion in its queue."""
        if self._num_ready is not None or self.ticket is None or self._board is None:
            return 0
        phase, _ = self._board.read(self._word, self.ticket)
        return self._board.num_beats if phase is Phase.WAITING else 0

    def claim(self) -> protocol.Claimed | None:
        """Where the ready blocks lie, theirs until `release`; None or no offsets: a miss."""
        return None if self.ticket is None else self._client._claim(self.ticket)

    def unclaim(self) -> None:
        """No worker was given the addresses."""
        if self.ticket is not None:
            self._client._unclaim(self.ticket)

    def release(self) -> None:
        """Nobody needs the blocks any more. Idempotent."""
        if self.ticket is not None:
            self._client._release(self.ticket, self._word, self._board)
            self.ticket = None
