"""Observations: a TOML file of what somebody measured, on any engine. See docs/doctor.md.

    prompt_tokens = 64000

    [[arms]]
    name = "recomputed"
    cache = "off"
    ttft_p50 = "12 s"

A misspelt key is refused: what is silently left out would be missed in the verdict.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from headstart.doctor.facts import Fact, Source
from headstart.doctor.readers.base import Document, Report
from headstart.doctor.vocabulary import LISTS, TOP, Observations
from headstart.errors import ConfigError
from headstart.settings import explain

_TABLE = re.compile(r"\s*\[\[\s*([A-Za-z_]+)\s*\]\]\s*(?:#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_]+)\s*=")


_NAMED = ("arms", "tiers", "workers")
"""Lists whose members are told apart by name; samples may share one."""


class ObservationsReader:
    """See the module."""

    name = "observations in TOML"
    is_live = False

    def knows(self, document: Document) -> bool:
        """See `Reader`: by its name, or a first line that is TOML of a known key."""
        if document.path.endswith(".toml"):
            return True
        lines = (line for line in document.head.splitlines() if line.strip())
        first = next((line for line in lines if not line.lstrip().startswith("#")), "")
        key, table = _KEY.match(first), _TABLE.fullmatch(first)
        return bool((key and key[1] in Observations.model_fields) or (table and table[1] in LISTS))

    def read(self, documents: Sequence[Document]) -> Report:
        """See `Reader`. Raises ConfigError."""
        return Report(facts=tuple(fact for each in documents for fact in self._read(each)))

    def _read(self, document: Document) -> Iterator[Fact]:
        try:
            tree = tomllib.loads(document.text)
        except (ValueError, RecursionError) as error:  # also of numbers without end
            raise ConfigError(f"{document.path} is not TOML: {error}") from error
        try:
            observations = Observations.model_validate(tree)
        except ValidationError as error:
            lines = "\n".join(_explained(error))
            raise ConfigError(f"{document.path}: {lines}") from error
        for scope in LISTS:
            names = Counter(each.name for each in getattr(observations, scope) if each.name)
            twice = [name for name, count in names.items() if count > 1]
            if twice and scope in _NAMED:
                raise ConfigError(f"{document.path}: two of {scope} have the name {twice[0]!r}")
        return _facts(observations, document)


def _explained(error: ValidationError) -> Iterator[str]:
    """As for settings, but with the nearest name alone: there are too many keys to list."""
    for line in explain(error, _model_at):
        text = line.partition(" allowed: ")[0].removesuffix("?")
        if text == line:
            yield line
            continue
        key = line.partition(" is unknown")[0].rpartition(".")[2]
        places = [f"[[{scope}]]" for scope, model in LISTS.items() if key in model.model_fields]
        places += ["the top"] if key in Observations.model_fields else []
        belongs = f"; it is a key of {' or '.join(places)}" if places else ""
        yield f"{text}{belongs}; all keys are in docs/doctor-observations.md"


def _model_at(path: list[str]) -> type[BaseModel]:
    return LISTS.get(path[0], Observations) if len(path) > 1 else Observations


def _facts(observations: Observations, document: Document) -> Iterator[Fact]:
    lines = _lines_of_keys(document.text)
    for key in observations.model_fields_set - LISTS.keys():
        source = Source(path=document.path, line=lines.get((TOP, 0, key)))
        yield Fact(key=key, value=getattr(observations, key), source=source)
    for scope in LISTS:
        for index, member in enumerate(getattr(observations, scope)):
            # Two files may tell of one tier: by its name. Samples are each their own.
            owner = member.name if scope in _NAMED else f"{document.path}[{index}]"
            for key in member.model_fields_set:
                line = lines.get((scope, index, key), lines.get((scope, index, "")))
                source = Source(path=document.path, line=line)
                value = getattr(member, key)
                yield Fact(key=key, value=value, source=source, scope=scope, owner=owner)


def _lines_of_keys(text: str) -> dict[tuple[str, int, str], int]:
    """The 1-based line of each key, by (list or top, index in the list, key).

    Enough for files as people write them; a key that is not found is cited by its file alone.
    """
    found: dict[tuple[str, int, str], int] = {}
    scope, index = TOP, 0
    counts: dict[str, Any] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        table, key = _TABLE.fullmatch(line), _KEY.match(line)
        if table:
            scope = table[1]
            index = counts[scope] = counts.get(scope, -1) + 1
            found[scope, index, ""] = number
        elif key:
            found.setdefault((scope, index, key[1]), number)
    return found
