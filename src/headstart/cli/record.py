"""`headstart node record`: what a node is asked, as a trace in a file."""

from __future__ import annotations

import math
import sys
import time
from contextlib import suppress
from pathlib import Path

import typer

from headstart import render
from headstart.errors import ConfigError
from headstart.node.recording import Recording, Written
from headstart.units import format_nbytes, format_seconds, parse_nbytes, parse_seconds

RECORD_SCHEMA = "headstart.node.record/1"
_EXIT_FINDING = 1


def record_trace(
    path: Path, out: Path, *, duration: str | None, max_bytes: str, namespace: str, json: str | None
) -> None:
    """Record and say what it came to. Raises ConfigError, or an OSError of the node's socket."""
    for_s = _seconds(duration)
    max_nbytes = _nbytes(max_bytes)
    render.check_target(json)
    started = time.monotonic()
    with Recording(path, out, namespace=namespace, max_nbytes=max_nbytes) as recording:
        print(f"recording to {out}; Ctrl-C ends it", file=sys.stderr)
        with suppress(KeyboardInterrupt):
            recording.run(for_s)
    written = recording.written
    seconds = time.monotonic() - started
    document = {
        "schema": RECORD_SCHEMA,
        "file": f"{out}",
        "seconds": seconds,
        "prompts": written.num_prompts,
        "nbytes": written.nbytes,
        "lost": written.num_lost,
        "refused": written.num_refused,
        "problem": written.problem or None,
        "is_full": written.is_full,
        "node_ended": written.has_ended,
    }
    render.publish(document, json, lambda: _show(written, out, seconds))
    if written.num_lost or written.num_refused or written.has_ended:
        raise typer.Exit(_EXIT_FINDING)


def _show(written: Written, out: Path, seconds: float) -> None:
    print(
        f"{written.num_prompts:,} prompts, {format_nbytes(written.nbytes)}, in "
        f"{format_seconds(seconds)}: {out}"
    )
    if written.is_full:
        print("ended: the file has all the bytes that --max-bytes allows")
    if written.has_ended:
        print("ended early: the node is gone, or does not answer")
    if written.num_lost:
        print(f"missing: {written.num_lost:,} prompts came faster than they were written")
    if written.num_refused:
        print(f"missing: {written.num_refused:,} prompts: {written.problem}")


def _seconds(duration: str | None) -> float:
    if duration is None:
        return math.inf
    try:
        for_s = parse_seconds(duration)
    except ConfigError as error:
        raise ConfigError(f"--for: {error}") from error
    if not for_s:
        raise ConfigError("--for: must be more than 0 seconds; leave it out to end by Ctrl-C")
    return for_s


def _nbytes(max_bytes: str) -> int:
    try:
        return parse_nbytes(max_bytes)
    except ConfigError as error:
        raise ConfigError(f"--max-bytes: {error}") from error
