"""The seam of readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headstart.doctor.facts import Fact
from headstart.errors import ConfigError

MAX_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A file's name as given, and its text."""

    path: str
    text: str


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

    def knows(self, document: Document) -> bool:
        """Whether this is its kind of file; cheap, never fails."""
        ...

    def read(self, documents: Sequence[Document]) -> Report:
        """The facts in all the files that it knows, in the order given.

        Together, because a counter only tells something by what it grew between two files. Broken
        parts are skipped and reported. Raises ConfigError only for what somebody wrote for the
        doctor and got wrong, such as a misspelt key.
        """
        ...


def load(paths: Sequence[Path], readers: Sequence[Reader]) -> Report:
    """The facts of several files. Raises ConfigError for one that cannot be opened."""
    facts: list[Fact] = []
    skipped: list[str] = []
    known: dict[str, list[Document]] = {reader.name: [] for reader in readers}
    for path in paths:
        document = _open(path)
        reader = next((each for each in readers if each.knows(document)), None)
        if reader is None:
            skipped.append(f"{path}: of no kind that is known ({', '.join(known)})")
        else:
            known[reader.name].append(document)
    for reader in readers:
        if known[reader.name]:
            report = reader.read(known[reader.name])
            facts += report.facts
            skipped += report.skipped
    return Report(facts=tuple(facts), skipped=tuple(skipped))


def _open(path: Path) -> Document:
    try:
        if path.stat().st_size > MAX_NBYTES:
            raise ConfigError(f"{path} is over {MAX_NBYTES >> 20} MiB; give the part that matters")
        # What is no UTF-8 in a log is no figure either.
        return Document(path=str(path), text=path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
