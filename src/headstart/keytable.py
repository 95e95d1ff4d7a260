"""Hash table from 32-byte keys to row numbers, in 12 to 16 bytes a row besides the keys.

Open addressing with linear probing over an array of uint32. Keys are cryptographic digests, so
their first eight bytes are the hash. A Python dict would need 155 bytes an entry, three quarters
of the whole budget of an index row, and seconds to rebuild; this one is rebuilt vectorised.

One writer at a time; readers need no lock. A reader works on one consistent (table, keys) pair and
compares keys in full, so a concurrent change can cost it a miss but never a wrong row for the key
that stood in the row at that moment.
"""

from __future__ import annotations

import numpy as np

from headstart.types import KEY_NBYTES, BlockKey

_EMPTY = 0
_REMOVED = 0xFFFFFFFF
_MIN_CAPACITY = 1 << 10


class KeyTable:
    """Maps keys to rows. The keys of all rows live here, `KEY_NBYTES` each, at `row`."""

    def __init__(self) -> None:
        self._num_used = 0  # entries that are not _EMPTY, so that probing always ends
        self._num_live = 0
        self._view = (np.zeros(_MIN_CAPACITY, np.uint32).data, bytearray())

    def __len__(self) -> int:
        return self._num_live

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        table, keys = self._view
        return table.nbytes + len(keys)

    def find(self, key: BlockKey) -> int | None:
        """The row of `key`, or None. Lock-free."""
        table, keys = self._view
        mask = len(table) - 1
        position = int.from_bytes(key[:8], "little") & mask
        while entry := table[position]:
            if entry != _REMOVED and keys.startswith(key, (entry - 1) * KEY_NBYTES):
                return int(entry) - 1
            position = (position + 1) & mask
        return None

    def key(self, row: int) -> BlockKey:
        """The key last written to `row`."""
        return BlockKey(bytes(self._view[1][row * KEY_NBYTES : (row + 1) * KEY_NBYTES]))

    def keys(self) -> np.ndarray:
        """The keys of all rows, as opaque `KEY_NBYTES` items. A view: copy it under the lock."""
        return np.frombuffer(self._view[1], f"V{KEY_NBYTES}")

    def grow(self, num_rows: int) -> None:
        """Make room for the keys of rows [0, num_rows)."""
        table, keys = self._view
        if num_rows * KEY_NBYTES <= len(keys):
            return
        longer = bytearray(num_rows * KEY_NBYTES)
        longer[: len(keys)] = keys
        self._view = (table, longer)

    def insert(self, key: BlockKey, row: int) -> None:
        """Add an absent key."""
        assert len(key) == KEY_NBYTES, "a key of another length would shift all others"
        table, keys = self._view
        if 3 * (self._num_used + 1) > 2 * len(table):
            self._rebuild(self._live_rows())
            table, keys = self._view
        keys[row * KEY_NBYTES : (row + 1) * KEY_NBYTES] = key
        mask = len(table) - 1
        position = int.from_bytes(key[:8], "little") & mask
        while table[position] not in (_EMPTY, _REMOVED):
            position = (position + 1) & mask
        self._num_used += table[position] == _EMPTY
        self._num_live += 1
        table[position] = row + 1

    def remove(self, key: BlockKey, row: int) -> None:
        """Remove a key that stands in `row`. The row's key bytes stay until the row is reused."""
        table, _ = self._view
        mask = len(table) - 1
        position = int.from_bytes(key[:8], "little") & mask
        while table[position] != row + 1:
            assert table[position] != _EMPTY, "key is not in the table"
            position = (position + 1) & mask
        table[position] = _REMOVED
        self._num_live -= 1

    def load(self, keys: np.ndarray, rows: np.ndarray, *, num_rows: int) -> None:
        """Replace the contents: `keys[i]`, `KEY_NBYTES` opaque bytes, stands in `rows[i]`."""
        self._view = (self._view[0], bytearray(num_rows * KEY_NBYTES))
        self.keys()[rows] = keys
        self._rebuild(rows)

    def _live_rows(self) -> np.ndarray:
        table = np.asarray(self._view[0])
        entries: np.ndarray = table[(table != _EMPTY) & (table != _REMOVED)].astype(np.int64)
        return entries - 1

    def _rebuild(self, rows: np.ndarray) -> None:
        """New table holding `rows`, at a load of at most 1/2.

        Each round places every pending entry whose position is still empty (of several for one
        position the last wins) and moves the others one position on.
        """
        keys = self._view[1]
        capacity = max(_MIN_CAPACITY, 1 << (2 * len(rows)).bit_length())
        table = np.zeros(capacity, np.uint32)
        hashes = np.frombuffer(keys, "<u8")[:: KEY_NBYTES // 8] if len(keys) else np.zeros(0, "<u8")
        position = hashes[rows] & np.uint64(capacity - 1)
        entry = rows.astype(np.uint32) + np.uint32(1)
        while len(entry):
            free = table[position] == _EMPTY
            table[position[free]] = entry[free]
            left = table[position] != entry
            entry = entry[left]
            position = (position[left] + np.uint64(1)) & np.uint64(capacity - 1)
        self._num_used = self._num_live = len(rows)
        self._view = (table.data, keys)
