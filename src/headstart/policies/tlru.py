"""Least recently used, with the ends of prompts first."""

from __future__ import annotations

from headstart.errors import ConfigError
from headstart.policies.base import Blocks
from headstart.policies.byrow import ByRow

TAIL_TOKENS = 1024
_MOST_BLOCKS = (1 << 16) - 1


class TlruPolicy:
    """Evicts ends of prompts that are quickly computed again, then by `lru`.

    For the slowest first tokens it matters how much of a prompt is not held, not how often
    something is hit. A conversation that comes back computes what is new in it and what was lost
    of it. Losing the last `tail_tokens` of a conversation costs no more than that many tokens, so
    these go first, the least recently used ones first, of all conversations; only when none are
    left is anything taken from a beginning, by `lru` again. So memory goes to what would make a
    first token late (Zhang et al. 2025, arXiv 2510.15152, who prove when that is optimal; their
    bound on what is computed in all is `tail_tokens` plus what a next prompt adds).

    Differences, since an index does not know conversations: a block belongs to every prompt that
    went through it, and counts as an end only if it is one of all those; the longest continuation
    that was ever evicted is what tells. A restart forgets it, and ends may be cut once more.
    """

    name = "tlru"

    def __init__(self, tail_tokens: int = TAIL_TOKENS) -> None:
        """Raises ConfigError."""
        if tail_tokens < 1:
            raise ConfigError(f"tlru={tail_tokens} must be a number of tokens of at least 1")
        self._tail_tokens = tail_tokens
        self._lost = ByRow("H", 0)  # blocks evicted behind it, of the longest prompt
        self._is_start = ByRow("B", 0)

    def watch(self, blocks: Blocks) -> None:
        """See `Watching.watch`."""
        self._blocks = blocks

    def on_insert(self, *, row: int, clock: int) -> int:
        """The end of a prompt, now."""
        self._lost[row] = self._is_start[row] = 0
        return clock

    def on_hit(self, *, row: int, priority: int, clock: int) -> int:
        """The present."""
        return clock

    def on_remove(self, *, row: int, priority: int, evicted: bool) -> None:
        """Its parent has lost one more than it had."""
        above = self._blocks.parent(row) if evicted else None
        if above is not None:
            lost = min(self._lost[row] + 1, _MOST_BLOCKS)
            self._lost[above] = max(self._lost[above], lost)

    def section(self, row: int) -> int:
        """0: the end of a prompt, as far as is known; 1: the start."""
        return self._is_start[row]

    def first_section(self) -> int:
        """Ends."""
        return 0

    def spare(self, *, row: int, priority: int) -> int | None:
        """An end that has lost all it may is a start from now on, of the same age."""
        lost = (self._lost[row] + 1) * self._blocks.tokens(row)
        if self._is_start[row] or lost <= self._tail_tokens:
            return None
        self._is_start[row] = 1
        return priority
