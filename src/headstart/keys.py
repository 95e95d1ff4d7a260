"""Namespaces and chained block keys: what makes two blocks interchangeable.

A wrong hit is the worst bug a prefix cache can have, so everything that changes KV bytes is part
of the `Namespace`, every key is a cryptographic hash chained over the whole prefix inside it, and
keys are compared in full on every read.

    seed  = namespace.id
    key 0 = blake2b-256(seed  || content of block 0, person="headstart/block")
    key i = blake2b-256(key i-1 || content of block i, person="headstart/block")

The content of a block is its token ids as little-endian uint32 (`block_keys`), or the engine's own
block hash (`keys_from_hashes`) where an engine has one: its hash also covers images, adapters and
cache salts, which token ids do not. The vectors in `tests/data/keys.json` freeze these formulas.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from headstart.errors import ConfigError
from headstart.types import KEY_NBYTES, MAX_BLOCK_NBYTES, BlockKey, KeyChain, NamespaceId
from headstart.units import align_up

KEY_FORMAT_VERSION = 1
_PERSON = b"headstart/block"
_ITEM_NBYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """How the KV of `block_size` consecutive tokens lies in a block's bytes.

    `axes` names the dimensions of `shape`, slowest first, for example "layer kv head token dim".
    Engines with packed or opaque layouts use dtype "uint8" and say in `axes` what the bytes are.
    """

    block_size: int
    axes: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size={self.block_size} must be >= 1 token")
        if self.dtype not in _ITEM_NBYTES:
            raise ConfigError(
                f"KV dtype {self.dtype!r} is unknown; allowed: {', '.join(_ITEM_NBYTES)}"
            )
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(f"block shape {self.shape} must have positive dimensions")
        if len(self.axes.split()) != len(self.shape):
            raise ConfigError(f"axes {self.axes!r} must name the {len(self.shape)} dimensions")
        if self.block_nbytes > MAX_BLOCK_NBYTES:
            raise ConfigError(
                f"a block of {self.block_nbytes} bytes is over the limit of {MAX_BLOCK_NBYTES}; "
                "use a smaller block_size"
            )

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.shape) * _ITEM_NBYTES[self.dtype]

    @property
    def padded_nbytes(self) -> int:
        """Bytes of the memory that holds one block: `block_nbytes` rounded up to whole pages."""
        return align_up(self.block_nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything that must be equal for two blocks to be interchangeable.

    `weights` is a fingerprint of the weights themselves, not of their path. `tenant` separates
    users who must not see each other's timing; `epoch` separates weights before and after an
    in-place update. The readable form, `to_json()`, lies beside the blocks.
    """

    model: str
    weights: str
    layout: BlockLayout
    isa: str = ""
    group: int = 0
    hash_algorithm: str = "headstart"
    hash_seed: str = ""
    tensor_parallel: str = "1"
    tenant: str = ""
    epoch: str = ""
    key_format: int = KEY_FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in ("model", "weights"):
            if not getattr(self, name):
                raise ConfigError(
                    f"namespace field {name!r} is empty: blocks of two models would mix"
                )

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, ASCII."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Namespace:
        """The namespace whose `to_json()` is `text`. Raises ConfigError when it is not one."""
        try:
            fields = json.loads(text)
            layout = fields.pop("layout")
            layout["shape"] = tuple(layout["shape"])
            return cls(layout=BlockLayout(**layout), **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"not a namespace: {error}") from error

    @property
    def id(self) -> NamespaceId:
        """32-byte digest of the canonical JSON."""
        digest = blake2b(
            self.to_json().encode("ascii"), digest_size=KEY_NBYTES, person=b"headstart/space"
        )
        return NamespaceId(digest.digest())


def block_keys(namespace: Namespace, tokens: Sequence[int]) -> KeyChain:
    """Keys of the full blocks of a prompt, in prompt order.

    The tail of fewer than `block_size` tokens has no key. Key i depends on the namespace and on
    tokens [0, (i + 1) * block_size). Pure; safe from any thread.
    Raises ValueError for anything but a flat sequence of whole numbers in [0, 2**32).
    """
    ids = np.asarray(tokens)
    whole = ids.dtype.kind in "iu" or not ids.size  # beyond 64 bits they are objects
    if ids.ndim != 1 or not whole or (ids.size and not 0 <= ids.min() <= ids.max() < 1 << 32):
        raise ValueError("token ids must be a flat sequence of whole numbers in [0, 2**32)")
    block_size = namespace.layout.block_size
    num_blocks = len(ids) // block_size
    content = ids[: num_blocks * block_size].astype("<u4").tobytes()
    bounds = range(0, len(content) + 1, 4 * block_size)
    return _chain(namespace, [content[start:stop] for start, stop in pairwise(bounds)])


def keys_from_hashes(namespace: Namespace, hashes: Sequence[bytes]) -> KeyChain:
    """Keys of blocks for which the engine has its own (chained) hashes, in prompt order."""
    return _chain(namespace, hashes)


def next_keys(parent: BlockKey | NamespaceId, hashes: Sequence[bytes]) -> list[BlockKey]:
    """Keys of the blocks that follow `parent`, or start a prompt where it is the namespace's id."""
    keys: list[BlockKey] = []
    above: bytes = parent
    for content in hashes:
        above = blake2b(above + content, digest_size=KEY_NBYTES, person=_PERSON).digest()
        keys.append(BlockKey(above))
    return keys


def _chain(namespace: Namespace, contents: Sequence[bytes]) -> KeyChain:
    namespace_id = namespace.id
    return KeyChain(
        namespace=namespace_id,
        block_nbytes=namespace.layout.block_nbytes,
        keys=tuple(next_keys(namespace_id, contents)),
    )
