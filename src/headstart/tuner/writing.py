"""Writes what was read of a trace: in Headstart's own form, or as Mooncake's JSON lines.

    {"schema": "headstart.trace/1", "block_size": 512, "has_sessions": false}
    {"session": "0", "in": 700, "out": 20, "ids": [0, 1], "at_s": 0.5}

Ids are numbers of blocks in the order of their first use: no text and no hash is kept, only which
prompts begin alike. Times are written where the trace had them; Mooncake's form cannot do without.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from headstart.errors import ConfigError
from headstart.traces.files import Header, Line
from headstart.tuner.recorded import Recorded

FORMS = ("headstart", "mooncake")


def check_form(form: str) -> None:
    """Raises ConfigError where nothing is written as that."""
    if form not in FORMS:
        raise ConfigError(f"a trace is not written as {form!r}; known: {', '.join(FORMS)}")


def write_trace(path: Path, recorded: Recorded, form: str) -> None:
    """Write it, packed where the name ends with .gz. Raises ConfigError.

    A file gets its name when it is whole: what was there before stays until then.
    """
    check_form(form)
    rows = _headstart(recorded) if form == "headstart" else _mooncake(recorded)
    is_stream = path.exists() and not path.is_file()
    target = path if is_stream else path.resolve()
    part = path if is_stream else target.with_name(f"{target.name}.part")
    try:
        with gzip.open(part, "wb") if path.suffix == ".gz" else part.open("wb") as file:
            for row in rows:
                file.write(msgspec.json.encode(row) + b"\n")
        if not is_stream:
            part.replace(target)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        if not is_stream:
            part.unlink(missing_ok=True)


def _headstart(recorded: Recorded) -> Iterator[object]:
    yield Header(block_size=recorded.block_size, has_sessions=recorded.has_sessions)
    order = np.arange(len(recorded))
    if recorded.has_sessions:
        order = np.lexsort((recorded.place, recorded.session))
    turns: dict[str, int] = {}
    for number, ids in _with_ids(recorded, order.tolist()):
        name = f"{number}"
        if recorded.has_sessions:
            agent = int(recorded.agent[number])
            name = f"{recorded.session[number]}" + (f"/{agent}" if agent else "")
        turns[name] = turns.get(name, -1) + 1
        yield Line(
            session=name,
            turn=turns[name],
            num_in=int(recorded.input_tokens[number]),
            num_out=int(recorded.output_tokens[number]),
            ids=list(ids),
            at_s=float(recorded.at_s[number]) if recorded.has_times else None,
            think_s=float(recorded.think_s[number]),
        )


def _mooncake(recorded: Recorded) -> Iterator[object]:
    for number, ids in _with_ids(recorded, range(len(recorded))):
        yield {
            "timestamp": round((recorded.at_s[number] - recorded.at_s[0]) * 1000.0),
            "input_length": int(recorded.input_tokens[number]),
            "output_length": int(recorded.output_tokens[number]),
            "hash_ids": ids,
        }


def _with_ids(recorded: Recorded, order: range | list[int]) -> Iterator[tuple[int, list[int]]]:
    ids: dict[int, int] = {}
    starts = recorded.starts.tolist()
    for number in order:
        blocks = recorded.blocks[starts[number] : starts[number + 1]].tolist()
        yield number, [ids.setdefault(block, len(ids)) for block in blocks]
