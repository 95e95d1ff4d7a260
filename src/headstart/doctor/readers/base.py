"""The seam of readers."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO, Protocol

from headstart.doctor.facts import Fact
from headstart.doctor.readers.placing import placed
from headstart.errors import ConfigError

MAX_NBYTES = 256 << 20
"""Of what is held in memory as a whole: everything but logs."""
MAX_STREAM_NBYTES = 16 << 30
"""Of what is read block by block, unpacked."""
HEAD_NBYTES = 1 << 20
_BLOCK_NBYTES = 1 << 20
BROKEN = (OSError, EOFError, zlib.error)
"""What reading a damaged or truncated file raises."""

Opener = Callable[[], AbstractContextManager[BinaryIO]]


class Document:
    """A file's name as given, and what is in it, read when asked for. Not thread-safe."""

    def __init__(
        self,
        *,
        path: str,
        text: str | None = None,
        opener: Opener | None = None,
        is_found: bool = False,
        origin: str = "",
    ) -> None:
        """Of a text, or of what `opener` opens, which may be asked several times.

        `is_found`: it lay in a folder or archive; nobody says that it is for the doctor. Documents
        of one `origin` are of one server, in the order of time.
        """
        self.path, self.is_found, self.origin = path, is_found, origin
        self.broken = ""
        """Why it was not read to its end."""
        self._opener = opener or (lambda: io.BytesIO((text or "").encode()))

    def blocks(self) -> Iterator[bytes]:
        """All its bytes, as far as they can be read: see `broken`."""
        nbytes = 0
        try:
            with self._opener() as stream:
                while block := stream.read(_BLOCK_NBYTES):
                    yield block
                    nbytes += len(block)
                    if nbytes >= MAX_STREAM_NBYTES:
                        self.broken = f"only the first {nbytes >> 30} GiB were read"
                        return
        except BROKEN as error:
            self.broken = f"broken after {nbytes} bytes: {error}"

    @cached_property
    def head(self) -> str:
        """Its first MiB."""
        kept = bytearray()
        for block in self.blocks():
            kept += block
            if len(kept) >= HEAD_NBYTES:
                break
        return kept.decode("utf-8", errors="replace")

    @property
    def text(self) -> str:
        """All of it. Raises ConfigError if that is too much."""
        kept = bytearray()
        for block in self.blocks():
            kept += block
            if len(kept) > MAX_NBYTES:
                raise ConfigError(
                    f"{self.path} is over {MAX_NBYTES >> 20} MiB; give the part that matters"
                )
        # What is no UTF-8 is no figure either.
        return kept.decode("utf-8", errors="replace")

    def has(self, *marks: bytes, within: int = MAX_NBYTES) -> bool:
        """Whether one of some short marks is in about its first `within` bytes."""
        overlap = max(map(len, marks))
        text, nbytes = b"", 0
        for block in self.blocks():
            text = text[-overlap:] + block
            nbytes += len(block)
            if any(mark in text for mark in marks):
                return True
            if nbytes >= within:
                break
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of reading."""

    facts: tuple[Fact, ...]
    skipped: tuple[str, ...] = ()
    """What could not be used, a line each: where and why."""


class Reader(Protocol):
    """Reads one kind of file. Stateless."""

    name: str
    """For messages."""
    is_live: bool
    """Whether it reads what a server wrote while it ran: of one run, whatever the arms."""

    def knows(self, document: Document) -> bool:
        """Whether this is its kind of file; cheap, never fails."""
        ...

    def read(self, documents: Sequence[Document]) -> Report:
        """The facts in all the files that it knows, in the order given.

        Together, because a counter only tells something by what it grew between two files. Broken
        parts are skipped and reported. Raises ConfigError only for what somebody wrote for the
        doctor and got wrong, such as a misspelt key, and for a file that is too large.
        """
        ...


def read_all(documents: Sequence[Document], readers: Sequence[Reader]) -> Report:
    """The facts of several files. Raises ConfigError as readers do, for files that were named."""
    facts: list[Fact] = []
    skipped: list[str] = []
    known: dict[str, list[Document]] = {reader.name: [] for reader in readers}
    for document in documents:
        reader = next((each for each in readers if each.knows(document)), None)
        if reader is not None:
            known[reader.name].append(document)
        elif not document.broken:
            skipped.append(f"{document.path}: of no kind that is known ({', '.join(known)})")
    reports = [(each, _read(each, known[each.name])) for each in readers if known[each.name]]
    told = [fact for reader, report in reports if not reader.is_live for fact in report.facts]
    for reader, report in reports:
        facts += placed(report.facts, told) if reader.is_live else report.facts
        skipped += report.skipped
    skipped += [f"{each.path}: {each.broken}" for each in documents if each.broken]
    return Report(facts=tuple(facts), skipped=tuple(skipped))


def _read(reader: Reader, documents: Sequence[Document]) -> Report:
    """With what lay in a folder and is wrong left out."""
    try:
        return reader.read(documents)
    except ConfigError:
        if not any(document.is_found for document in documents):
            raise
    good: list[Document] = []
    wrong: list[str] = []
    for document in documents:
        try:
            reader.read([document])
            good.append(document)
        except ConfigError as error:
            if not document.is_found:
                raise
            wrong.append(str(error))
    report = reader.read(good) if good else Report(facts=())
    return Report(facts=report.facts, skipped=(*wrong, *report.skipped))
