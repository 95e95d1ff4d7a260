"""The bytes of a block on a medium: the golden header, and that no damage passes."""

import struct
from dataclasses import dataclass, replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headstart.blockfile import (
    FORMAT_VERSION,
    HEADER_NBYTES,
    Damage,
    encode_header,
    inspect_block,
    slot_nbytes,
)
from headstart.types import BlockKey, NamespaceId

# Of the header page, the fields end here; zeros follow.
FIELDS_NBYTES = 152
FIELDS = {
    "checksum": range(8),
    "magic": range(8, 16),
    "version": range(16, 20),
    "header length": range(20, 24),
    "generation": range(24, 32),
    "payload length": range(32, 40),
    "namespace": range(40, 72),
    "key": range(72, 104),
    "parent": range(104, 136),
    "payload checksum": range(136, 152),
}
GENERATION = (1 << 40) + 3
KEY = BlockKey(bytes(range(32)))
PARENT = BlockKey(b"\x11" * 32)
SPACE = NamespaceId(b"\x22" * 32)


@dataclass(frozen=True)
class Block:
    """A block as it is written, and what a reader expects of it."""

    payload: bytes = bytes(range(256)) * 20
    key: BlockKey = KEY
    parent: BlockKey | None = PARENT
    namespace: NamespaceId = SPACE
    generation: int = GENERATION

    def header(self) -> bytearray:
        page = bytearray(b"\xee" * HEADER_NBYTES)
        encode_header(
            memoryview(page),
            memoryview(self.payload),
            key=self.key,
            parent=self.parent,
            namespace=self.namespace,
            generation=self.generation,
        )
        return page

    def inspect(self, header, payload) -> Damage | None:
        return inspect_block(
            memoryview(header),
            memoryview(payload),
            key=self.key,
            namespace=self.namespace,
            generation=self.generation,
        )


BLOCK = Block()


def flipped(content, bit):
    """`content` with one bit flipped."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << (bit % 8)
    return changed


def sealed(header):
    """`header` with a checksum that is right again: what only a liar would write."""
    digest = xxhash.xxh3_64_intdigest(bytes(header[8:]))
    return bytearray(struct.pack("<Q", digest)) + header[8:]


def test_golden_header():
    header = BLOCK.header()
    assert header[:FIELDS_NBYTES].hex() == (
        "2419e15a218a5293"
        "485354424c4f434b"
        "01000000"
        "00100000"
        "0300000000010000"
        "0014000000000000"
        + "22" * 32
        + bytes(range(32)).hex()
        + "11" * 32
        + "87cf83cc9a055cf4f875f2fa2e99df80"
    )
    assert not any(header[FIELDS_NBYTES:])
    assert len(header) == HEADER_NBYTES == 4096


def test_the_header_is_what_the_specification_says():
    header = BLOCK.header()
    assert header[8:16] == b"HSTBLOCK"
    assert struct.unpack_from("<IIQQ", header, 16) == (FORMAT_VERSION, 4096, GENERATION, 5120)
    assert header[136:152] == xxhash.xxh3_128_digest(BLOCK.payload)
    assert struct.unpack_from("<Q", header) == (xxhash.xxh3_64_intdigest(bytes(header[8:])),)
    first = replace(BLOCK, parent=None).header()
    assert first[104:136] == bytes(32)
    assert first[136:] == header[136:]


@pytest.mark.parametrize(
    ("block_nbytes", "nbytes"),
    [(1, 8192), (4096, 8192), (4097, 12288), (1 << 20, (1 << 20) + 4096)],
)
def test_room_of_a_block(block_nbytes, nbytes):
    assert slot_nbytes(block_nbytes) == nbytes


@given(st.binary(min_size=1, max_size=9000))
def test_a_sound_block_passes(payload):
    block = replace(BLOCK, payload=payload)
    assert block.inspect(block.header(), payload) is None


@pytest.mark.parametrize("name", FIELDS)
def test_every_flipped_bit_of_a_field_is_found(name):
    header = BLOCK.header()
    for byte in FIELDS[name]:
        for bit in range(8):
            assert BLOCK.inspect(flipped(header, 8 * byte + bit), BLOCK.payload) is Damage.HEADER


def test_a_flipped_bit_anywhere_in_the_header_page_is_found():
    header = BLOCK.header()
    end = 8 * FIELDS_NBYTES
    bits = {*range(0, 8 * HEADER_NBYTES, 37), *range(end - 16, end + 16), 8 * HEADER_NBYTES - 1}
    for bit in sorted(bits):
        assert BLOCK.inspect(flipped(header, bit), BLOCK.payload) is Damage.HEADER


def test_a_flipped_bit_anywhere_in_the_payload_is_found():
    header = BLOCK.header()
    for bit in sorted({*range(0, 8 * len(BLOCK.payload), 41), 8 * len(BLOCK.payload) - 1}):
        assert BLOCK.inspect(header, flipped(BLOCK.payload, bit)) is Damage.PAYLOAD


@given(st.data(), st.binary(min_size=1, max_size=5000))
def test_any_flipped_bit_is_found(data, payload):
    block = replace(BLOCK, payload=payload)
    header = block.header()
    bit = data.draw(st.integers(0, 8 * (HEADER_NBYTES + len(payload)) - 1))
    whole = flipped(header + payload, bit)
    found = block.inspect(whole[:HEADER_NBYTES], whole[HEADER_NBYTES:])
    assert found is (Damage.HEADER if bit < 8 * HEADER_NBYTES else Damage.PAYLOAD)


@given(st.data())
def test_a_torn_page_is_found(data):
    """Sectors of 512 bytes, some of which still hold what was there before."""
    old = replace(BLOCK, payload=bytes(5120), key=BlockKey(b"o" * 32), generation=GENERATION - 1)
    new, before = BLOCK.header() + BLOCK.payload, old.header() + old.payload
    sectors = data.draw(st.lists(st.booleans(), min_size=18, max_size=18))
    torn = b"".join(
        (new if written else before)[512 * n : 512 * (n + 1)] for n, written in enumerate(sectors)
    )
    sound = BLOCK.inspect(torn[:HEADER_NBYTES], torn[HEADER_NBYTES:]) is None
    assert sound == (torn == new)


@pytest.mark.parametrize("fill", [b"\0", b"\xff"])
def test_a_page_that_was_never_written_is_found(fill):
    assert BLOCK.inspect(fill * HEADER_NBYTES, BLOCK.payload) is Damage.HEADER


@pytest.mark.parametrize(
    ("other", "damage"),
    [
        (replace(BLOCK, key=BlockKey(b"k" * 32)), Damage.FOREIGN),
        (replace(BLOCK, namespace=NamespaceId(b"n" * 32)), Damage.FOREIGN),
        (replace(BLOCK, payload=BLOCK.payload + b"x"), Damage.FOREIGN),
        (replace(BLOCK, payload=BLOCK.payload[:-1]), Damage.FOREIGN),
        (replace(BLOCK, generation=GENERATION - 1), Damage.STALE),
        (replace(BLOCK, generation=GENERATION + 1), Damage.STALE),
        (replace(BLOCK, payload=bytes(5120)), Damage.PAYLOAD),
    ],
    ids=["key", "namespace", "longer", "shorter", "older", "newer", "payload"],
)
def test_a_sound_header_of_another_block_is_refused(other, damage):
    assert BLOCK.inspect(other.header(), BLOCK.payload) is damage


@pytest.mark.parametrize("byte", [*FIELDS["magic"], *FIELDS["version"], *FIELDS["header length"]])
def test_another_format_is_refused_even_with_a_right_checksum(byte):
    header = sealed(flipped(BLOCK.header(), 8 * byte))
    assert BLOCK.inspect(header, BLOCK.payload) is Damage.HEADER


@pytest.mark.parametrize("name", ["generation", "payload length", "namespace", "key"])
def test_every_bit_of_identity_is_compared(name):
    for byte in FIELDS[name]:
        for bit in range(8):
            header = sealed(flipped(BLOCK.header(), 8 * byte + bit))
            found = BLOCK.inspect(header, BLOCK.payload)
            assert found is (Damage.STALE if name == "generation" else Damage.FOREIGN)
