"""The bytes of a block on a medium: one header page, then the payload.

`docs/block-format.md` is the specification. Everything here is pure: bytes in, verdict out.

    [0, 8)      xxh3-64 of bytes [8, 4096)        little-endian throughout
    [8, 16)     magic "HSTBLOCK"
    [16, 20)    format version
    [20, 24)    header length, 4096
    [24, 32)    generation: the tier's write counter, never reused within a directory
    [32, 40)    payload length in bytes
    [40, 72)    namespace id
    [72, 104)   block key
    [104, 136)  parent key, zeros for the first block of a prompt
    [136, 152)  xxh3-128 of the payload
    [152, 4096) zeros
    [4096, ...) payload, then undefined bytes up to a multiple of 4096

The header checksum covers the whole page, so that a flipped bit anywhere in it is seen. Nothing is
ever unpickled.
"""

from __future__ import annotations

import struct
from enum import Enum

import xxhash

from headstart.types import KEY_NBYTES, BlockKey, NamespaceId
from headstart.units import PAGE_NBYTES, align_up

FORMAT_VERSION = 1
HEADER_NBYTES = PAGE_NBYTES
_MAGIC = b"HSTBLOCK"
_NO_PARENT = bytes(KEY_NBYTES)
_FIELDS = struct.Struct("<Q8sIIQQ32s32s32s16s")
_CHECKSUM = struct.Struct("<Q")
_PADDING = bytes(HEADER_NBYTES - _FIELDS.size)


class Damage(Enum):
    """Why the bytes of a slot are not the block that was asked for."""

    TORN = "torn"
    """Fewer bytes than a block could be read."""
    HEADER = "header"
    """The header's checksum, magic or version is wrong."""
    FOREIGN = "foreign"
    """A sound header of another block, namespace or length."""
    STALE = "stale"
    """This block, but of an earlier generation of the slot."""
    PAYLOAD = "payload"
    """The payload's checksum is wrong."""


def slot_nbytes(block_nbytes: int) -> int:
    """Bytes that one block takes on a medium: header page and payload in whole pages."""
    return HEADER_NBYTES + align_up(block_nbytes)


def encode_header(
    header: memoryview,
    payload: memoryview,
    *,
    key: BlockKey,
    parent: BlockKey | None,
    namespace: NamespaceId,
    generation: int,
) -> None:
    """Write the header of `payload` into `header`, `HEADER_NBYTES` of writable memory.

    `payload` is exactly the block's bytes, without padding.
    """
    _FIELDS.pack_into(
        header,
        0,
        0,
        _MAGIC,
        FORMAT_VERSION,
        HEADER_NBYTES,
        generation,
        len(payload),
        namespace,
        key,
        parent or _NO_PARENT,
        xxhash.xxh3_128_digest(payload),
    )
    header[_FIELDS.size :] = _PADDING
    _CHECKSUM.pack_into(header, 0, xxhash.xxh3_64_intdigest(header[_CHECKSUM.size :]))


def inspect_block(
    header: memoryview,
    payload: memoryview,
    *,
    key: BlockKey,
    namespace: NamespaceId,
    generation: int,
) -> Damage | None:
    """None when header and payload are exactly the expected block; otherwise what is wrong.

    The payload is checked last, because its checksum is the expensive one. An older generation of
    the same block is refused too: its slot was given away since, so nothing vouches for it.
    """
    (
        checksum,
        magic,
        version,
        header_nbytes,
        found_generation,
        nbytes,
        space,
        found_key,
        _,
        digest,
    ) = _FIELDS.unpack_from(header)
    if checksum != xxhash.xxh3_64_intdigest(header[_CHECKSUM.size :]):
        return Damage.HEADER
    if (magic, version, header_nbytes) != (_MAGIC, FORMAT_VERSION, HEADER_NBYTES):
        return Damage.HEADER
    if found_key != key or space != namespace or nbytes != len(payload):
        return Damage.FOREIGN
    if found_generation != generation:
        return Damage.STALE
    if digest != xxhash.xxh3_128_digest(payload):
        return Damage.PAYLOAD
    return None
