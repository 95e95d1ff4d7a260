"""The columns of the index: what is known of each block, 46 bytes a row besides the key.

A row is a small number that stands for one held block. Columns are numpy arrays, so that a million
rows are restored, dumped and scanned vectorised, each seen through a memoryview as well, whose
scalar access is four times faster than numpy's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import numpy as np

from headstart.forest import with_descendants
from headstart.types import KEY_NBYTES

_MAX_DRAWN = 4096
NO_PARENT = 0xFFFFFFFF

RECORD = np.dtype(
    [
        ("row", "<u4"),
        ("parent", "<u4"),  # row, or NO_PARENT
        ("namespace", "<u4"),  # number given by the tier
        ("block_nbytes", "<u4"),  # 0: the row is free
        ("offset", "<u8"),
        ("generation", "<u8"),
        ("priority", "<u8"),  # as a clock: see `headstart.policies.base`
        ("key", f"V{KEY_NBYTES}"),
    ]
)
"""One row as it is dumped and logged. The last record of a row holds."""

PACK_RECORD = struct.Struct("<IIIIQQQ32s")
assert PACK_RECORD.size == RECORD.itemsize

_COLUMNS = {
    "parent": "<u4",
    "num_children": "<u4",
    "pins": "<u4",
    "namespace": "<u4",
    "block_nbytes": "<u4",
    "offset": "<u8",
    "generation": "<u8",
    "priority": "<u8",
}
_LOGGED = tuple(name for name in RECORD.names or () if name in _COLUMNS)
_GROWTH = 1.25


def by_value(values: np.ndarray, function: Callable[[int], int]) -> np.ndarray:
    """`function` of each of `values` (uint64), called once for each run of equal values."""
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1]))[: len(values)]
    results = np.array([function(int(value)) for value in values[starts]], np.uint64)
    return np.repeat(results, np.diff(np.append(starts, len(values))))


class Rows:
    """Columns of equal length, and the free rows among them. Not thread-safe."""

    __slots__ = ("_arrays", "_free", "_num_rows", "num_used", *_COLUMNS)

    parent: memoryview
    num_children: memoryview
    pins: memoryview
    namespace: memoryview
    block_nbytes: memoryview
    offset: memoryview
    generation: memoryview
    priority: memoryview

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._free: list[int] = []
        self.num_used = 0
        self._num_rows = 0  # rows [0, _num_rows) were used at least once
        self._resize(1 << 10)

    def __len__(self) -> int:
        """Length of the columns."""
        return len(self.block_nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(array.nbytes for array in self._arrays.values()) + 40 * len(self._free)

    def column(self, name: str) -> np.ndarray:
        """A column as an array, up to the highest row ever used."""
        return self._arrays[name][: self._num_rows]

    def usage(self, live: np.ndarray) -> dict[int, int]:
        """Bytes of the blocks in rows `live`, by number of namespace."""
        numbers = self.column("namespace")[live].astype(np.int64)
        nbytes = np.bincount(numbers, self.column("block_nbytes")[live])
        return {number: int(nbytes[number]) for number in np.flatnonzero(nbytes).tolist()}

    def with_descendants(self, found: Iterable[int]) -> list[int]:
        """These rows and all rows below them."""
        parent = self.column("parent").astype(np.int64)
        none = len(parent)
        alone = (parent == NO_PARENT) | (self.column("block_nbytes") == 0)
        goes = np.zeros(none, bool)
        goes[list(found)] = True
        below: np.ndarray = with_descendants(np.where(alone, none, parent), goes)
        return np.flatnonzero(below).tolist()

    def records(self, live: np.ndarray) -> np.ndarray:
        """Rows `live` as records (dtype RECORD), without their keys."""
        records = np.zeros(len(live), RECORD)
        records["row"] = live
        for name in _LOGGED:
            records[name] = self.column(name)[live]
        return records

    def some(self, at_most: int | None = None) -> np.ndarray:
        """All rows in use, or at most so many by chance, without looking at all of them.

        Of those none may be found where hardly any row is in use.
        """
        nbytes = self.column("block_nbytes")
        if at_most is None:
            return np.flatnonzero(nbytes)
        random = np.random.default_rng()
        drawn = np.arange(len(nbytes))
        if len(drawn) > _MAX_DRAWN:
            drawn = np.unique(random.integers(len(nbytes), size=_MAX_DRAWN))
        return random.permutation(drawn[nbytes[drawn] > 0])[:at_most]

    def take(self) -> int:
        """A free row, zeroed but for what its next user must set. Grows the columns when full."""
        self.num_used += 1
        if self._free:
            return self._free.pop()
        if self._num_rows == len(self):
            self._resize(int(len(self) * _GROWTH) + 1)
        self._num_rows += 1
        return self._num_rows - 1

    def give_back(self, row: int) -> None:
        """Free a row."""
        self.block_nbytes[row] = 0
        self.num_children[row] = 0
        self.pins[row] = 0
        self.parent[row] = NO_PARENT
        self._free.append(row)
        self.num_used -= 1

    def load(self, records: np.ndarray) -> None:
        """Replace all rows by `records`, one a row, of dtype RECORD."""
        self._num_rows = int(records["row"].max()) + 1 if len(records) else 0
        self._resize(max(1 << 10, self._num_rows))
        for name in _LOGGED:
            self._arrays[name][records["row"]] = records[name]
        has_parent = records["parent"] != NO_PARENT
        parents = records["parent"][has_parent]
        self._arrays["num_children"][: self._num_rows] = np.bincount(
            parents, minlength=self._num_rows
        )
        self.num_used = len(records)
        self._free = np.flatnonzero(self.column("block_nbytes") == 0).tolist()

    def _resize(self, length: int) -> None:
        for name, dtype in _COLUMNS.items():
            longer = np.zeros(length, dtype)
            if name in self._arrays:
                present = self._arrays[name][: self._num_rows]
                longer[: min(len(present), length)] = present[:length]
            self._arrays[name] = longer
            setattr(self, name, longer.data)
