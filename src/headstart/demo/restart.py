"""The restart phase, in a process of its own: `python -m headstart.demo.restart`.

The parent writes one JSON request to the child's stdin. The child answers in JSON lines on stdout:
`{"step": i}` before answer i, and `{"result": ...}` at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from headstart.config import open_store
from headstart.demo.device import device_reads, difference, drop_page_cache
from headstart.demo.results import Answer, DeviceReads
from headstart.demo.session import Session, SessionOptions
from headstart.errors import HeadstartError
from headstart.settings import Settings

SILENCE_S = 300.0
"""A child that says nothing for so long is given up."""


def run_in_new_process(
    options: SessionOptions,
    settings: Mapping[str, Any],
    root: Path,
    on_step: Callable[[int], None],
) -> tuple[tuple[Answer, ...], DeviceReads, float]:
    """Run a session over the store of `settings`, whose file tier is in `root`, in a new process.

    Returns its answers, what was read from the device for question 1, and the seconds before it.
    Raises HeadstartError with the child's last words when it fails.
    """
    request = {
        "model_dir": str(options.model_dir),
        "block_size": options.block_size,
        "max_new_tokens": options.max_new_tokens,
        "settings": dict(settings),
        "root": str(root),
    }
    started = time.monotonic()
    first_at = started
    result: Mapping[str, Any] | None = None
    for message in _talk(json.dumps(request)):
        if "step" in message:
            first_at = time.monotonic() if message["step"] == 0 else first_at
            on_step(message["step"])
        result = message.get("result", result)
    if result is None:
        raise HeadstartError("the restarted process ended without a result")
    answers = tuple(Answer.from_mapping(answer) for answer in result["answers"])
    return answers, DeviceReads(**result["device"]), first_at - started


def _command() -> list[str]:
    return [sys.executable, "-m", "headstart.demo.restart"]


def _talk(request: str) -> Iterator[Mapping[str, Any]]:
    """Start the child, give it its request, and yield its messages until it ends."""
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            _command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        ) as child,
    ):
        assert child.stdin is not None and child.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), child.stdin:
                child.stdin.write(request.encode())
            yield from map(json.loads, _lines(child.stdout))
            child.wait(SILENCE_S)
        finally:
            child.kill()
        if child.returncode != 0:
            errors.seek(0)
            last_words = errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise HeadstartError(
                f"the restarted process failed (exit code {child.returncode}): "
                + "".join(last_words)
            )


def _lines(pipe: IO[bytes]) -> Iterator[bytes]:
    """The lines of a pipe as they come. Raises HeadstartError after too long a silence."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if not selector.select(SILENCE_S):
                raise HeadstartError(f"the restarted process was silent for {SILENCE_S:.0f} s")
            data = os.read(pipe.fileno(), 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from lines


def main() -> None:
    """The child: answer the request on stdin."""
    request = json.load(sys.stdin)
    # Whatever a library prints must not get between the messages.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers_out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

        def say(**message: object) -> None:
            answers_out.write(json.dumps(message) + "\n")
            answers_out.flush()

        _run(request, say)


def _run(request: Mapping[str, Any], say: Callable[..., None]) -> None:
    root = Path(request["root"])
    settings = Settings.from_mapping(request["settings"])
    drop_page_cache(root)
    session = Session(
        SessionOptions(
            model_dir=Path(request["model_dir"]),
            block_size=request["block_size"],
            max_new_tokens=request["max_new_tokens"],
        )
    )
    answers: list[Answer] = []
    with open_store(settings) as store:
        engine = session.engine(store)
        before = device_reads(root)
        device = difference(before, before)
        say(step=0)
        for answer in session.answers(engine):
            if not answers:
                device = difference(before, device_reads(root))
            answers.append(answer)
            say(step=len(answers))
    say(result={"answers": [asdict(answer) for answer in answers], "device": asdict(device)})


if __name__ == "__main__":
    main()
