"""Loads as traces that other load generators replay: Mooncake's JSON lines.

    {"timestamp": 1250, "input_length": 40, "output_length": 8, "hash_ids": [0, 1, 5]}

Timestamps are whole milliseconds since the first request, and do not go back. An id stands for a
block and all that is before it; the last block may be shorter. Ids are whole numbers from 0, in
the order of their first use.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from headstart.bench.load import Ask
from headstart.errors import ConfigError

_MS = 1000.0


def scheduled(asks: Sequence[Ask], starts: Mapping[str, float]) -> list[tuple[float, Ask]]:
    """Each ask with its time in seconds, sorted by it.

    Its trace's, or else the start of its session and all pauses since then: how long a server will
    take for the turns between is not known.
    """
    ends = dict(starts)
    timed = []
    for ask in asks:
        at_s = ask.at_s
        if at_s is None:
            at_s = ends[ask.session] = ends[ask.session] + ask.think_s
        timed.append((at_s, ask))
    timed.sort(key=lambda each: each[0])  # stable: at one time, in the load's order
    return timed


def mooncake(timed: Sequence[tuple[float, Ask]], block_size: int) -> Iterator[dict[str, object]]:
    """The lines of a trace."""
    ids: dict[bytes, int] = {}
    first_s = timed[0][0] if timed else 0.0
    for at_s, ask in timed:
        tokens = array("Q", ask.tokens)
        chain, hash_ids = b"", []
        for start in range(0, len(tokens), block_size):
            block = tokens[start : start + block_size].tobytes()
            chain = blake2b(chain + block, digest_size=16).digest()
            hash_ids.append(ids.setdefault(chain, len(ids)))
        yield {
            "timestamp": round((at_s - first_s) * _MS),
            "input_length": len(ask.tokens),
            "output_length": ask.max_tokens,
            "hash_ids": hash_ids,
        }


def write_mooncake(path: Path, timed: Sequence[tuple[float, Ask]], block_size: int) -> None:
    """Write them to a file, line by line. Raises ConfigError."""
    try:
        with path.open("wb") as file:
            for line in mooncake(timed, block_size):
                file.write(msgspec.json.encode(line) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
