"""`headstart node decisions`: the decision log as lines, of text or of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from headstart.errors import ConfigError
from headstart.units import format_seconds

_POLL_S = 0.5
_TITLES = "request, tokens: found, loaded, why; waited and prefill (predicted); saved, regret"


def show_decisions(
    ask: Callable[[int], Mapping[str, Any]], target: str | None, *, follow: bool
) -> None:
    """Write every record, and with `follow` those that come, until Ctrl-C.

    `ask(n)` gives the records after number n, see `DecisionLog.after`. `target` as in --json: "-"
    is stdout, None a line of text each.
    """
    if target is None or target == "-":
        if target is None:
            print(_TITLES, file=sys.stderr)
        _copy(ask, sys.stdout, as_json=target is not None, follow=follow)
        return
    first = ask(0)  # a file of earlier ones stays if there is no node
    try:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        with Path(target).open("w", encoding="utf-8") as file:
            _copy(ask, file, as_json=True, follow=follow, first=first)
    except OSError as error:
        raise ConfigError(f"--json {target} cannot be written: {error.strerror}") from error


def _copy(
    ask: Callable[[int], Mapping[str, Any]],
    file: TextIO,
    *,
    as_json: bool,
    follow: bool,
    first: Mapping[str, Any] | None = None,
) -> None:
    last, answer = 0, first
    try:
        while True:
            answer = ask(last) if answer is None else answer
            if last and answer["num_lost"]:
                print(f"{answer['num_lost']} were too many to be kept", file=sys.stderr)
            for record in answer["decisions"]:
                print(json.dumps(record) if as_json else _line(record), file=file)
            file.flush()
            last = answer["last"]
            if not answer["decisions"]:
                if not follow:
                    return
                time.sleep(_POLL_S)
            answer = None
    except KeyboardInterrupt:
        return


def _line(record: Mapping[str, Any]) -> str:
    return (
        f"{_plain(record['request_id'])}, {record['prompt_tokens']:,}: {record['found_tokens']:,}, "
        f"{record['loaded_tokens']:,}, {record['reason']}; "
        f"{format_seconds(record['actual_load_s'])} ({format_seconds(record['predicted_load_s'])}) "
        f"and {format_seconds(record['actual_prefill_s'])} "
        f"({format_seconds(record['predicted_prefill_s'])}); "
        f"{_signed(record['saved_s'])}, {format_seconds(record['regret_s'])}"
    )


def _plain(text: str) -> str:
    """Text from users: it makes no line of its own and moves no cursor."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _signed(seconds: float) -> str:
    return format_seconds(seconds) if seconds >= 0 else f"-{format_seconds(-seconds)}"
