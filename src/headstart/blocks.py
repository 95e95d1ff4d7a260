"""What an eviction policy sees of an index: its blocks, and whether a key is one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headstart.keytable import KeyTable
from headstart.rows import NO_PARENT, Rows
from headstart.types import BlockKey

DEFAULT_TOKENS = 16
"""Of a block whose namespace was not opened."""


class HeldBlocks:
    """`policies.Blocks` of an index."""

    def __init__(self, rows: Rows, table: KeyTable, block_tokens: Mapping[int, int]) -> None:
        """`block_tokens` by number of namespace."""
        self._rows, self._table, self._block_tokens = rows, table, block_tokens

    def __len__(self) -> int:
        """See `Blocks.__len__`."""
        return len(self._table)

    def key(self, row: int) -> int:
        """See `Blocks.key`: the first bytes of the digest."""
        return int.from_bytes(self._table.key(row)[:8], "little")

    def parent(self, row: int) -> int | None:
        """See `Blocks.parent`."""
        above = self._rows.parent[row]
        return None if above == NO_PARENT else above

    def tokens(self, row: int) -> int:
        """See `Blocks.tokens`."""
        return self._block_tokens.get(self._rows.namespace[row], DEFAULT_TOKENS)


def finder(
    table: KeyTable, is_gone: Callable[[int], bool] | None
) -> Callable[[BlockKey], int | None]:
    """Finds the row of a key that is held and, by the policy, not gone. Lock-free."""
    if is_gone is None:
        return table.find

    def find(key: BlockKey) -> int | None:
        row = table.find(key)
        return None if row is None or is_gone(row) else row

    return find
