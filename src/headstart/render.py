"""How results reach people and programs: tables, progress, errors, JSON.

Results go to stdout: a table on a terminal, aligned plain lines when piped. Errors and progress go
to stderr, progress only on a terminal. Colour follows `NO_COLOR`, which rich honours itself.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headstart.errors import ConfigError

Advance = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table. Numbers are aligned right, with their unit in the title."""

    title: str
    numeric: bool = False


def print_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, title: str = ""
) -> None:
    """Print `rows`, which have one cell a column, to stdout."""
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"row {row!r} must have {len(columns)} cells")
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(columns, rows, title)
        return
    if title:
        print(title)
    for line in plain_lines(columns, rows):
        print(line)


def printable(text: str) -> str:
    """What others wrote, such as a server's error, as one line that moves no terminal's cursor."""
    return "".join(each if each.isprintable() else " " for each in text)


def plain_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as aligned text: a line of titles, then a line a row, two spaces between columns."""
    cells = [[column.title for column in columns], *rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if column.numeric else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def _print_rich(columns: Sequence[Column], rows: Sequence[Sequence[str]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title) if title else None, title_justify="left")
    for column in columns:
        table.add_column(Text(column.title), justify="right" if column.numeric else "left")
    for row in rows:
        # Text, not str: a cell such as "tiers[0]" is no markup.
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def print_error(message: str) -> None:
    """Print `message` to stderr, as one line."""
    parts = (printable(line).strip() for line in message.splitlines())
    print("headstart:", "; ".join(part for part in parts if part), file=sys.stderr)


@contextmanager
def progress(title: str) -> Iterator[Advance]:
    """A progress bar on stderr while the block runs; nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )


def check_target(target: str | None, *, option: str = "--json") -> None:
    """Find out now whether a result can be written: before work that takes long.

    Nothing is left behind. Raises ConfigError.
    """
    if target in (None, "-"):
        return
    path = Path(str(target))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_stream(path):
            return  # opened twice, it would end for its reader
        is_new = not os.path.lexists(path)
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from error


def publish(
    document: Mapping[str, object], json_target: str | None, show: Callable[[], None]
) -> None:
    """Give a command's result: `show` it to people, and write `document` where `--json` says.

    With "-" as target the JSON is all that stdout gets. `document` names its `schema`, such as
    "headstart.bench.storage/1". Raises ConfigError when the file cannot be written.
    """
    if "schema" not in document:
        raise ValueError("a JSON document must name its schema")
    if json_target == "-":
        sys.stdout.write(_text(document))
        return
    try:
        show()
    finally:  # also where nobody reads stdout any more
        if json_target is not None:
            write_text(Path(json_target), _text(document))


def save(document: Mapping[str, object], json_target: str | None) -> None:
    """Write what there is so far, if `--json` names a file; a pipe gets only the whole.

    Raises ConfigError when it cannot be written.
    """
    if json_target not in (None, "-") and not _is_stream(Path(str(json_target))):
        write_text(Path(str(json_target)), _text(document))


def write_text(path: Path, text: str, *, option: str = "--json") -> None:
    """Write a result to the file that an option names: it is whole at any time.

    Raises ConfigError when it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_ours = path.is_file() or not os.path.lexists(path)
        if is_ours and not path.is_symlink() and os.access(path.parent, os.W_OK):
            try:
                part.write_text(text, encoding="utf-8")
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
        else:  # a pipe, a device, a link to what is elsewhere
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from error


def _is_stream(path: Path) -> bool:
    """Whether it is a pipe, a device or the like."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _text(document: Mapping[str, object]) -> str:
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
