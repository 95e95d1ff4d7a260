"""The file tier passes the contract: direct and buffered."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from pathlib import Path
from types import MappingProxyType

import pytest

from headstart.testing import (
    BLOCK_NBYTES,
    Damage,
    Ending,
    TierContract,
    TierHarness,
    TierRig,
    aligned_buffers,
    tier_state_machine,
)
from headstart.tiers import FileTier, FileTierOptions, Tier
from headstart.types import BlockKey

HEADER = 4096
SLOT = HEADER + BLOCK_NBYTES
SLAB = 4 * SLOT
# What syncs often, but is not about the disk, runs in memory where the machine allows it.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def find_block(slabs: Path, key: BlockKey, generation: int) -> tuple[Path, int] | None:
    """File and offset of a block, found by its header alone: magic, generation and key."""
    for path in sorted(slabs.glob("*.slab")):
        content = path.read_bytes()
        for offset in range(0, len(content), HEADER):
            head = content[offset : offset + HEADER]
            if (
                len(head) == HEADER
                and head[8:16] == b"HSTBLOCK"
                and struct.unpack_from("<Q", head, 24) == (generation,)
                and head[72:104] == key
            ):
                return path, offset
    return None


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Change a file through the page cache, which direct reads see as well."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        file.write(data)


class FileHarness:
    """Slabs of four blocks under `root`, or in memory; harm is done to the slab files."""

    durable = True
    capacity_blocks = 16
    damages = frozenset(Damage)
    skips = MappingProxyType({})
    buffers = staticmethod(aligned_buffers)
    direct = True

    def __init__(self, root: Path | None = None) -> None:
        self.folder = root or Path(tempfile.mkdtemp(prefix="headstart-", dir=MEMORY))
        self._temporary = root is None
        self._root = self.folder / "0"
        self._num_roots = 1
        self._killed: list[Tier] = []

    def make(self) -> Tier:
        return FileTier(
            FileTierOptions(
                root=self._root,
                capacity_nbytes=self.capacity_blocks * SLOT,
                slab_nbytes=SLAB,
                direct=self.direct,
                durable=False,
            )
        )

    def reopen(self, tier: Tier, ending: Ending) -> Tier:
        if ending is Ending.CLOSE:
            tier.close()
        else:
            # The lock is still held here, so the medium is copied as it lies there now.
            self._killed.append(tier)
            copy = self.folder / str(self._num_roots)
            self._num_roots += 1
            shutil.copytree(self._root, copy)
            self._root = copy
        return self.make()

    def damage(self, tier: Tier, key: BlockKey, damage: Damage, donor: BlockKey) -> None:
        place, other = self._find(tier, key), self._find(tier, donor)
        if place is None or other is None:
            return  # cut off together with another block before: damaged already
        path, offset = place
        content = path.read_bytes().ljust(offset + SLOT, b"\0")
        match damage:
            case Damage.FLIP_PAYLOAD:
                position = offset + HEADER + 4000
                overwrite(path, position, bytes([content[position] ^ 0x10]))
            case Damage.FLIP_HEADER:
                position = offset + 110
                overwrite(path, position, bytes([content[position] ^ 1]))
            case Damage.ZERO:
                overwrite(path, offset, bytes(SLOT))
            case Damage.TRUNCATE:
                os.truncate(path, offset + HEADER + 512)
            case Damage.OTHER_KEY | Damage.OTHER_NAMESPACE:
                source, start = other
                overwrite(path, offset, source.read_bytes()[start : start + SLOT])

    def close(self) -> None:
        for tier in self._killed:
            tier.close()
        if self._temporary:
            shutil.rmtree(self.folder)

    def _find(self, tier: Tier, key: BlockKey) -> tuple[Path, int] | None:
        (held,) = [record for record in tier.index.held() if bytes(record["key"]) == key]
        return find_block(self._root / "slabs", key, int(held["generation"]))


class BufferedHarness(FileHarness):
    direct = False


class TestFileTier(TierContract):
    tier_class = FileTier

    @pytest.fixture
    def harness(self, tmp_path) -> TierHarness:
        return FileHarness(tmp_path)


class TestFileTierBuffered(TierContract):
    """Through the page cache, as where a file system takes no direct I/O."""

    tier_class = FileTier

    @pytest.fixture
    def harness(self) -> TierHarness:
        return BufferedHarness()


TestFileTierStates = tier_state_machine(FileHarness, max_examples=25).TestCase


@pytest.fixture
def rig(tmp_path):
    with TierRig(FileHarness(tmp_path)) as rig:
        yield rig


def test_a_block_lies_where_the_index_says(rig):
    """Header and payload by a parser of our own."""
    chain = rig.chain("abc")
    opened = rig.begin_write(chain)
    opened.end()
    slabs = rig.harness.folder / "0" / "slabs"
    for number, (key, source) in enumerate(zip(chain, opened.memory, strict=True)):
        (held,) = [r for r in rig.tier.index.held() if bytes(r["key"]) == key]
        path, offset = find_block(slabs, key, int(held["generation"]))
        assert int(path.stem) * SLAB + offset == held["offset"]
        content = path.read_bytes()[offset : offset + SLOT]
        assert content[40:72] == chain.namespace
        assert content[104:136] == (chain.keys[number - 1] if number else bytes(32))
        assert content[HEADER:] == bytes(source)


def test_the_directory_is_what_the_docstring_says(rig):
    root = rig.harness.folder / "0"
    rig.store(rig.chain("ab"))
    rig.tier.flush()
    assert sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()) == [
        "format.json",
        "index.log",
        "lock",
        "namespaces/1.json",
        *(f"slabs/00000{number}.slab" for number in range(4)),
    ]
    assert (root / "namespaces/1.json").read_text() == rig.namespace.to_json()
    assert (root / "lock").read_text() == str(os.getpid())


def test_only_the_owner_may_read(rig):
    root = rig.harness.folder / "0"
    rig.store(rig.chain("ab"))
    for path in (root, *root.rglob("*")):
        private = 0o700 if path.is_dir() else 0o600
        if path.name not in ("format.json", "1.json"):
            assert path.stat().st_mode & 0o777 == private, path


def test_a_finished_write_outlives_a_kill_even_without_a_flush(rig):
    """Nothing waits in this process: the log is written when the batch is finished."""
    rig.store(rig.chain("abcd"))
    rig.reopen(Ending.KILL)
    rig.expect(rig.chain("abcd"))
    rig.discard(rig.chain("abcd").keys[3:])
    rig.reopen(Ending.KILL)
    assert rig.tier.lookup(rig.chain("abcd").keys) == 3


def test_slabs_are_allocated_in_full_and_never_grow(rig):
    slabs = sorted((rig.harness.folder / "0" / "slabs").iterdir())
    rig.store(*rig.roots(3 * rig.capacity))
    for path in slabs:
        status = path.stat()
        assert status.st_size == SLAB
        assert status.st_blocks * 512 >= SLAB


def test_adjacent_blocks_move_together_each_with_its_own_verdict(rig):
    chain = rig.chain("abcd")
    rig.store(chain)
    assert len(rig.begin_read(chain).batch) < 4, "neighbours are read by one call"
    harness = rig.harness
    harness.damage(rig.tier, chain.keys[3], Damage.FLIP_PAYLOAD, chain.keys[0])
    outcomes = rig.read(chain)
    assert [outcome.value for outcome in outcomes] == ["done"] * 3 + ["dropped"]
