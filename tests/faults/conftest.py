"""A file tier in a directory that the tests harm, volumes that fail, and media that are mounted."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest

from headstart.testing import BLOCK_NBYTES, Ending, TierRig, aligned_buffers
from headstart.tiers import FileTier, FileTierOptions
from headstart.types import KeyChain, Outcome

SLOT = 4096 + BLOCK_NBYTES
SLAB = 4 * SLOT
CAPACITY = 4 * SLAB


class FolderHarness:
    """A file tier of 16 blocks. What is in `options` when it is opened again is used then."""

    durable = True
    capacity_blocks = 16
    damages = frozenset()
    skips = MappingProxyType({})
    buffers = staticmethod(aligned_buffers)

    def __init__(self, root: Path, **options) -> None:
        self.root = root
        self.options = {"capacity_nbytes": CAPACITY, "slab_nbytes": SLAB} | options
        self.clocks: dict[str, Callable[[], float]] = {}
        self.between: Callable[[Path], object] = lambda root: None
        """Called with the directory while nobody has it open."""
        self._killed: list[FileTier] = []

    def make(self) -> FileTier:
        return FileTier(FileTierOptions(root=self.root, **self.options), **self.clocks)

    def reopen(self, tier: FileTier, ending: Ending) -> FileTier:
        if ending is Ending.CLOSE:
            tier.close()
        else:
            self._killed.append(tier)
            copy = self.root.with_name(self.root.name + "+")
            shutil.copytree(self.root, copy)
            self.root = copy
        self.between(self.root)
        return self.make()

    def damage(self, tier, key, damage, donor) -> None:
        raise NotImplementedError

    def close(self) -> None:
        for tier in self._killed:
            tier.close()


class FaultyVolume:
    """A volume whose reads and writes pass, fail or are short, as `fault` says.

    `fault(kind, offset)` with kind "read" or "write" returns None, an OSError to raise, or a
    number of bytes to move at most. `num_calls` counts by kind.
    """

    def __init__(self, inner, fault=lambda kind, offset: None) -> None:
        self.inner, self.fault = inner, fault
        self.num_calls = {"read": 0, "write": 0}
        self.capacity_nbytes, self.direct = inner.capacity_nbytes, inner.direct

    def read(self, offset, buffers):
        return self._move("read", offset, buffers)

    def write(self, offset, buffers):
        return self._move("write", offset, buffers)

    def close(self) -> None:
        self.inner.close()

    def _move(self, kind, offset, buffers):
        self.num_calls[kind] += 1
        fault = self.fault(kind, offset)
        if isinstance(fault, OSError):
            raise fault
        if fault is not None:
            # Whole pages, as the medium must have them; the rest of the buffers is not touched.
            kept, left = [], fault
            for buffer in buffers:
                kept.append(buffer[: left // 4096 * 4096])
                left -= len(kept[-1])
            buffers = [buffer for buffer in kept if len(buffer)]
            if not buffers:
                return 0
        return getattr(self.inner, kind)(offset, buffers)


@pytest.fixture
def make_rig(tmp_path) -> Iterator[Callable[..., TierRig]]:
    """Makes rigs over file tiers; closes what the test leaves open."""
    rigs: list[TierRig] = []

    def make(root: Path = tmp_path / "cache", **options) -> TierRig:
        rig = TierRig(FolderHarness(root, **options))
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.tier.check_invariants()
        rig.close()


@pytest.fixture
def rig(make_rig) -> TierRig:
    """One file tier in `tmp_path / "cache"`."""
    return make_rig()


@pytest.fixture
def faulty(rig) -> FaultyVolume:
    """The volume of `rig`, which fails as told."""
    rig.tier.volume = FaultyVolume(rig.tier.volume)
    return rig.tier.volume


@dataclass(frozen=True)
class Blocks:
    """Questions about the blocks of a rig's tier."""

    rig: TierRig

    def place(self, key) -> tuple[Path, int]:
        """Slab file and offset of a held block."""
        held = self.rig.tier.index.held()
        (offset,) = [int(r["offset"]) for r in held if bytes(r["key"]) == key]
        number, position = divmod(offset, self.rig.tier.index.slots.slab_nbytes)
        return self.rig.harness.root / "slabs" / f"{number:06d}.slab", position

    def outcomes(self, chain: KeyChain) -> str:
        """One letter a block of a read: + done, - miss, d dropped, f failed."""
        letters = {Outcome.DONE: "+", Outcome.MISS: "-", Outcome.DROPPED: "d", Outcome.FAILED: "f"}
        return "".join(letters[outcome] for outcome in self.rig.read(chain))


@pytest.fixture
def blocks() -> Callable[[TierRig], Blocks]:
    """`Blocks` of a rig."""
    return Blocks


class Media:
    """Mounts and loop devices for one test. What cannot be made skips the test, loudly."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._undo: list[list[str]] = []

    def command(self, *words: object) -> str:
        done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"cannot run `{' '.join(map(str, words))}`: {done.stderr.strip()}")
        return done.stdout.strip()

    def mount(self, name: str, *words: object) -> Path:
        target = self._folder / name
        target.mkdir()
        self.command("mount", *words, target)
        self._undo.append(["umount", "--lazy", str(target)])
        return target

    def tmpfs(self, nbytes: int) -> Path:
        return self.mount("tmpfs", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs")

    def ext4(self, nbytes: int) -> Path:
        image = self._folder / "image"
        image.touch()
        self.command("truncate", "-s", nbytes, image)
        self.command("mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", image)
        target = self.mount("ext4", "-o", "loop", image)
        shutil.rmtree(target / "lost+found")
        return target

    def read_only(self, source: Path) -> Path:
        target = self.mount("read-only", "--bind", source)
        self.command("mount", "-o", "remount,ro,bind", target)
        return target

    def loop_device(self, nbytes: int) -> Path:
        image = self._folder / "disk"
        self.command("truncate", "-s", nbytes, image)
        device = self.command("losetup", "--find", "--show", image)
        self._undo.append(["losetup", "--detach", device])
        return Path(device)

    def close(self) -> None:
        for words in reversed(self._undo):
            subprocess.run(words, check=True, capture_output=True)


@pytest.fixture
def media(tmp_path_factory) -> Iterator[Media]:
    """Makes media; they are taken down after the test, and after the rigs that use them."""
    media = Media(tmp_path_factory.mktemp("media"))
    yield media
    media.close()
