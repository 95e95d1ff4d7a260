"""What takes longest to compute again stays."""

from __future__ import annotations

from headstart.costs import num_pairs
from headstart.errors import ConfigError
from headstart.policies.base import CLOCK_BITS, Blocks, pack
from headstart.policies.byrow import ByRow

EVEN_TOKENS = 32_768
"""By default: of an 8B model (16 GFLOP a token, 0.5 MFLOP a pair of them)."""
_UNIT = 16
"""Of a key, for a block at the start of a prompt: differences of a 16th are told."""
_MOST_SAVED = (1 << 20) - 1
"""Of one block, in `_UNIT`s."""


class CostPolicy:
    """Evicts the leaf whose seconds of computing a byte buy the least, uses of long ago less.

    The key of a block is what it saves and, as in GreedyDual-Size (Cao and Irani 1997), the key of
    the last leaf evicted before its last use. What s tokens after p others save is

        token_s * s + pair_s * (p*s + s*s/2)          (`headstart.costs`)

    that is `1 + (p + s/2) / even_tokens` times what they would without attention, where
    `even_tokens` = token_s / pair_s: the tokens to attend to that cost as much as the weights do.
    Only blocks of one size compete by it, so that bytes and the speed of the engine cancel out:
    a block deep in a prompt is worth more than one at the start, and long prompts outlive short
    ones of the same age. Of equal keys the older use goes.

    A restart keeps the order, and forgets what it came from. Keys rise by about 16 to 100 each time
    the whole tier is replaced, and stop after 33 million: it is `lru` then.
    """

    name = "cost"

    def __init__(self, even_tokens: int = EVEN_TOKENS) -> None:
        """Raises ConfigError."""
        if even_tokens < 1:
            raise ConfigError(f"cost={even_tokens} must be a number of tokens of at least 1")
        self._even_tokens = even_tokens
        self._age = 0
        self._depth = ByRow("I", 0)  # 1 for the first block of a prompt; 0: not known yet
        self._saved = ByRow("I", 0)  # in `_UNIT`s; 0: not known yet

    def watch(self, blocks: Blocks) -> None:
        """See `Watching.watch`."""
        self._blocks = blocks

    def on_insert(self, *, row: int, clock: int) -> int:
        """What it saves, from now on."""
        self._depth[row] = 0
        saved = self._saved[row] = self._saved_by(row)
        return pack(self._age + saved, clock)

    def on_hit(self, *, row: int, priority: int, clock: int) -> int:
        """What it saves, from now on."""
        saved = self._saved[row]
        if not saved:
            saved = self._saved[row] = self._saved_by(row)
        return pack(self._age + saved, clock)

    def on_remove(self, *, row: int, priority: int, evicted: bool) -> None:
        """The coldest is what the next ones start from; others say nothing of age."""
        if evicted:
            self._age = max(self._age, priority >> CLOCK_BITS)

    def _saved_by(self, row: int) -> int:
        tokens = self._blocks.tokens(row)
        pairs = num_pairs((self._depth_of(row) - 1) * tokens, tokens)
        return min(round(_UNIT * (1.0 + pairs / tokens / self._even_tokens)), _MOST_SAVED)

    def _depth_of(self, row: int) -> int:
        """Counted up to the nearest block whose depth is known, and noted for those between."""
        path: list[int] = []
        above: int | None = row
        while above is not None and not self._depth[above]:
            path.append(above)
            above = self._blocks.parent(above)
        depth = 0 if above is None else self._depth[above]
        for each in reversed(path):
            depth += 1
            self._depth[each] = depth
        return depth
