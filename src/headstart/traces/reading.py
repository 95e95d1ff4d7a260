"""What a trace tells of a request, and how files and folders of traces are read: line by line."""

from __future__ import annotations

import gzip
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, BinaryIO, TypeVar, cast

import msgspec

from headstart.errors import ConfigError

CANNOT = (OSError, EOFError, zlib.error)
"""What a file raises that is not there, cut short or damaged."""
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises: of something else, or nested too deeply."""
_GZIP = b"\x1f\x8b"
_MARK = b"\xef\xbb\xbf"
"""A byte order mark, with which some programs begin UTF-8."""
_SUFFIX = re.compile(r"\.(jsonl?|ndjson|tar|tgz)(\.gz)?$")
_TAR = re.compile(r"\.(tar|tgz)(\.gz)?$")
_MAX_SHOWN = 5

Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
"""Tokens of a prompt or of a block."""
Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Id = int | str
"""Of a block: it stands for all that is before it, too."""
_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """One request. Its prompt is its pieces, in order."""

    session: str
    turn: int
    pieces: tuple[tuple[str, int], ...]
    """Key and tokens of each. Equal keys have equal text, behind equal text."""
    output_tokens: int
    at_s: float | None = None
    """Since the trace's first request; None: it does not tell."""
    think_s: float = 0.0
    """From the answer to the turn before: a person's, or a tool's."""
    tokens: tuple[int, ...] | None = None
    """The prompt itself, where the trace has it."""
    has_short_block: bool = False
    """The last piece is shorter than a block, and the trace has an id for it all the same."""


Session = list[TracedRequest]
"""A session with those nested in it, or a single request where a trace knows no sessions."""


class Broken:
    """What of a trace could not be read, where that is counted instead of refused."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[str] = []
        """What was wrong with the first few, with their places."""

    def add(self, message: str) -> None:
        """One more."""
        self.count += 1
        if len(self.first) < _MAX_SHOWN:
            self.first.append(message)


def skip(broken: Broken | None, error: ConfigError) -> None:
    """Count what is broken; raise the error where nobody counts."""
    if broken is None:
        raise error
    broken.add(str(error))


def files_of(path: Path) -> list[Path]:
    """A file, or those of traces in a folder and below, by name. Raises ConfigError."""
    if not path.is_dir():
        return [path]
    found = sorted(each for each in path.rglob("*") if each.is_file() and _SUFFIX.search(each.name))
    if not found:
        raise ConfigError(f"{path} has no file of a trace: .json, .jsonl, .gz or .tar")
    return found


def is_tar(path: Path) -> bool:
    """Whether a file holds others. Raises ConfigError."""
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"{path} is no file; a trace is read more than once, so write what a pipe gives to one"
        )
    try:
        return tarfile.is_tarfile(path)
    except CANNOT as error:
        if not isinstance(error, OSError) and not _TAR.search(path.name):
            return False  # damaged soon: of lines, those before are there
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _opened(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        is_packed = file.read(len(_GZIP)) == _GZIP
    return cast(BinaryIO, gzip.open(path)) if is_packed else path.open("rb")


def whole(path: Path) -> bytes:
    """What is in a file, unpacked. Raises ConfigError."""
    try:
        with _opened(path) as file:
            return file.read().removeprefix(_MARK)
    except CANNOT as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def lines(path: Path, broken: Broken | None = None) -> Iterator[tuple[str, bytes]]:
    """Place and text of each line that is not empty, of all files. Raises ConfigError.

    What comes after damage is lost, and counts as one.
    """
    for file in files_of(path):
        if is_tar(file):
            for name, text in members(file, broken):
                for number, line in enumerate(text.splitlines(), start=1):
                    if line.strip():
                        yield f"{file}, {name}, line {number}", line
        else:
            yield from _lines(file, broken)


def members(path: Path, broken: Broken | None = None) -> Iterator[tuple[str, bytes]]:
    """Name and text of each file of a trace in a tar. Raises ConfigError."""
    name = "its start"
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = member.name
                is_trace = member.isfile() and name.endswith((".json", ".jsonl", ".ndjson"))
                file = archive.extractfile(member) if is_trace else None
                if file is not None:
                    yield name, file.read().removeprefix(_MARK)
    except (*CANNOT, tarfile.TarError) as error:
        skip(broken, ConfigError(f"{path}, after {name}, cannot be read: {error}"))


def _lines(path: Path, broken: Broken | None) -> Iterator[tuple[str, bytes]]:
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                text = line.removeprefix(_MARK) if number == 1 else line
                if text.strip():
                    yield f"{path}, line {number}", text
    except CANNOT as error:
        skip(broken, ConfigError(f"{path}, after line {number}, cannot be read: {error}"))


def decoded(text: bytes, kind: type[_Read], place: str) -> _Read:
    """JSON as what it should be. Raises ConfigError with its place."""
    try:
        return msgspec.json.decode(text, type=kind)
    except NOT_JSON as error:
        raise ConfigError(f"{place}: {error}") from error


def blocks(
    ids: Sequence[Id], num_tokens: int, block_size: int, scope: str, tail: str
) -> tuple[tuple[str, int], ...]:
    """The pieces of a prompt; what no id stands for is a piece that nobody else has."""
    pieces = [
        (f"{scope}{each}", min(block_size, num_tokens - index * block_size))
        for index, each in enumerate(ids)
    ]
    rest = num_tokens - sum(count for _, count in pieces)
    return (*pieces, (tail, rest)) if rest else tuple(pieces)


def digest(text: str) -> str:
    """A key for a text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
