"""What the kit wrote: the model against which every answer of a tier is checked."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from headstart.types import BlockKey, KeyChain, NamespaceId

Place = tuple[NamespaceId, BlockKey]


def payload(namespace: NamespaceId, key: BlockKey, version: int, nbytes: int) -> bytes:
    """The bytes that the kit stores under a key: all distinct, none compressible."""
    return hashlib.shake_128(namespace + key + version.to_bytes(4, "little")).digest(nbytes)


class Ledger:
    """Which versions of which blocks a read may return, and which block follows which.

    The model of a cache that may forget but must not lie: a version may be read back from the
    moment its write begins until the block is discarded. Safe from several threads, except
    `discard`, `discard_namespace` and `restore`.
    """

    def __init__(self) -> None:
        self.parents: dict[BlockKey, BlockKey | None] = {}
        """Every block ever written, with its parent."""
        self._written: dict[Place, set[int]] = {}
        self._allowed: dict[Place, set[int]] = {}

    def remember(self, chain: KeyChain, version: int) -> None:
        """This version of the blocks of `chain` is, or was, being written."""
        parent = chain.parent
        for key in chain:
            if key != parent:  # a duplicate in a batch is no child of itself
                self.parents.setdefault(key, parent)
            self._written.setdefault((chain.namespace, key), set()).add(version)
            self._allowed.setdefault((chain.namespace, key), set()).add(version)
            parent = key

    def allowed(self, chain: KeyChain) -> list[frozenset[int]]:
        """The versions that a read of each block may return now."""
        return [frozenset(self._allowed.get((chain.namespace, key), ())) for key in chain]

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """A read of these blocks and their descendants must not be DONE any more."""
        doomed, newest = set(keys), set(keys)
        while newest:
            newest = {key for key, parent in self.parents.items() if parent in newest} - doomed
            doomed |= newest
        self._allowed = {place: v for place, v in self._allowed.items() if place[1] not in doomed}

    def discard_namespace(self, namespace: NamespaceId) -> None:
        """A read of any block of this namespace must not be DONE any more."""
        self._allowed = {place: v for place, v in self._allowed.items() if place[0] != namespace}

    def restore(self) -> None:
        """Discarded blocks may be back: the tier was killed before it made their end durable."""
        self._allowed = {place: set(versions) for place, versions in self._written.items()}


def check_block(chain: KeyChain, index: int, got: memoryview, versions: Collection[int]) -> None:
    """The bytes in `got` are one of these versions of block `index` of `chain`."""
    key = chain.keys[index]
    content = bytes(got[: chain.block_nbytes])
    for version in sorted(versions):
        if content == payload(chain.namespace, key, version, chain.block_nbytes):
            return
    raise AssertionError(
        f"the tier lied: block {index} of {len(chain)} came out DONE, but holds none of the "
        f"versions {sorted(versions)} that may be held under key {key.hex()[:12]}"
    )
