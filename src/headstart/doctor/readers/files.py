"""From what was named to documents: files, folders, tar archives, each of them gzipped or not.

Nothing is written to disk. Small members of an archive are kept, up to a limit; large ones are read
from the archive again each time.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from headstart.doctor.readers.base import BROKEN, MAX_STREAM_NBYTES, Document, Opener
from headstart.errors import ConfigError

MAX_FILES = 10_000
_MEMBER_NBYTES = 4 << 20
"""What is kept of one member of an archive, and not read from it again."""
_KEPT_NBYTES = 64 << 20
_GZIP = b"\x1f\x8b"
_TAR_MAGIC = slice(257, 262)


def open_all(paths: Sequence[Path], skipped: list[str]) -> list[Document]:
    """All documents, in the order given; of a folder and an archive by their times.

    What lies in a folder or an archive and cannot be read is added to `skipped`. Raises ConfigError
    for what was named and cannot be opened.
    """
    found: list[Document] = []
    for path in paths:
        try:
            if path.is_dir():
                found += _folder(path, skipped)
            else:
                found += _file(path, skipped, is_found=False)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    return found


def _folder(folder: Path, skipped: list[str]) -> Iterator[Document]:
    files: list[tuple[float, Path]] = []
    for top, _, names in os.walk(folder):
        for name in names:
            path = Path(top, name)
            try:
                status = path.stat()
            except OSError as error:
                skipped.append(f"{path} cannot be read: {error.strerror}")
                continue
            if stat.S_ISREG(status.st_mode) and status.st_size:
                files.append((status.st_mtime, path))
    # Two snapshots of one server tell nothing in the wrong order.
    for number, (_, path) in enumerate(sorted(files)):
        if number == MAX_FILES:
            skipped.append(f"{folder}: {len(files)} files; only the oldest {MAX_FILES} were read")
            return
        try:
            yield from _file(path, skipped, is_found=True)
        except OSError as error:
            skipped.append(f"{path} cannot be read: {error.strerror or error}")


def _file(path: Path, skipped: list[str], *, is_found: bool) -> list[Document]:
    """One document, or those of an archive. Raises OSError."""
    opener: Opener = partial(_plain, path)
    head = _head(opener)
    if head.startswith(_GZIP):
        opener = partial(_unzipped, opener)
        with suppress(*BROKEN):  # the document says so itself
            head = _head(opener)
    if head[_TAR_MAGIC] == b"ustar":
        return list(_Archive(path=str(path), opener=opener, skipped=skipped).documents())
    return [Document(path=str(path), opener=opener, is_found=is_found)]


def _plain(path: Path) -> BinaryIO:
    return path.open("rb")


def _head(opener: Opener) -> bytes:
    with opener() as stream:
        return stream.read(_TAR_MAGIC.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Archive:
    path: str
    opener: Opener
    skipped: list[str]

    def documents(self) -> Iterator[Document]:
        """Its files by time, as far as it can be read."""
        files: list[tuple[float, str, Opener]] = []
        try:
            with self.opener() as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
                files.extend(self._members(tar))  # those before an error stay
        except (*BROKEN, tarfile.TarError) as error:
            self.skipped.append(f"{self.path}: broken after {len(files)} files: {error}")
        for _, name, opener in sorted(files, key=lambda each: each[:2]):
            yield Document(path=f"{self.path}/{name}", opener=opener, is_found=True)

    def _members(self, tar: tarfile.TarFile) -> Iterator[tuple[float, str, Opener]]:
        kept = num_files = 0
        for member in tar:
            if not member.isreg() or member.issparse() or not member.size:
                continue
            num_files += 1
            if num_files > MAX_FILES or member.offset_data + member.size > MAX_STREAM_NBYTES:
                self.skipped.append(
                    f"{self.path}: only its first {num_files - 1} files were read: at most "
                    f"{MAX_FILES}, and {MAX_STREAM_NBYTES >> 30} GiB"
                )
                return
            opener: Opener = partial(_part, self.opener, member.offset_data, member.size)
            content = tar.extractfile(member) if member.size <= _MEMBER_NBYTES else None
            if content is not None and kept + member.size <= _KEPT_NBYTES:
                kept += member.size
                opener = partial(io.BytesIO, content.read())
            if _head(opener).startswith(_GZIP):
                opener = partial(_unzipped, opener)
            yield float(member.mtime), member.name, opener


@contextmanager
def _unzipped(opener: Opener) -> Iterator[BinaryIO]:
    with opener() as packed, gzip.GzipFile(fileobj=packed) as stream:
        yield cast(BinaryIO, stream)


@contextmanager
def _part(opener: Opener, offset: int, nbytes: int) -> Iterator[BinaryIO]:
    with opener() as stream:
        stream.seek(offset)
        with io.BufferedReader(_Part(stream, nbytes)) as part:
            yield part


class _Part(io.RawIOBase):
    """The next `nbytes` of a stream."""

    def __init__(self, stream: BinaryIO, nbytes: int) -> None:
        self._stream, self._left = stream, nbytes

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        """See io.RawIOBase."""
        block = self._stream.read(min(len(buffer), self._left))
        buffer[: len(block)] = block
        self._left -= len(block)
        return len(block)
