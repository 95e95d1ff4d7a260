"""Traces of sessions: turns that grow, waits for tools, sessions within sessions.

    WEKA          kv-cache-tester: a JSON document a session (or a line each, or a tar of them);
                  hash_ids of whole blocks, `block_size` tokens each; sessions may be nested
    MLCommons     JSON lines: the messages of agentic conversations, with tools' delays, as text
    ShareGPT      a JSON array of conversations, or a line each: who said what, as text

Checked against the files of kv-cache-tester and mlcommons/endpoints (example 11); ShareGPT after
its description.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headstart.errors import ConfigError
from headstart.traces.reading import (
    NOT_JSON,
    Broken,
    Id,
    Natural,
    Positive,
    Session,
    TracedRequest,
    blocks,
    decoded,
    digest,
    files_of,
    is_tar,
    lines,
    members,
    skip,
    whole,
)
from headstart.traces.sampling import Sample

CHARACTERS_A_TOKEN = 4
"""An estimate: a text is counted without anybody's tokenizer."""
_PIECE = 16 * CHARACTERS_A_TOKEN
"""Characters of a text that keep together: texts that begin alike share what is before."""
_ANSWERS = frozenset({"gpt", "assistant", "model", "chatgpt", "bing", "bard"})
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class _WekaRequest(msgspec.Struct):
    t: _Seconds = 0.0
    num_in: Positive | None = msgspec.field(name="in", default=None)
    num_out: Natural = msgspec.field(name="out", default=0)
    hash_ids: list[Id] = []
    think_time: _Seconds | None = None
    api_time: _Seconds | None = None
    requests: list[_WekaRequest] | None = None
    """Only a nested session has any."""


class _WekaSession(msgspec.Struct):
    id: str
    requests: list[_WekaRequest]
    block_size: Positive = 64
    hash_id_scope: str = "local"


class _WekaLengths(msgspec.Struct):
    """Of a session that is left: its hash ids are passed over."""

    num_in: int = msgspec.field(name="in", default=0)
    id: str = ""
    requests: list[_WekaLengths] = []

    @property
    def num_tokens(self) -> int:
        return self.num_in + sum(each.num_tokens for each in self.requests)


def weka(
    path: Path, broken: Broken | None = None, sample: Sample | None = None
) -> Iterator[Session]:
    """Sessions of kv-cache-tester; of a broken one nothing. Raises ConfigError.

    An empty one for each that is not in the sample.
    """
    for file in files_of(path):
        for place, text in _documents(file, broken):
            found: Session = []
            try:
                if sample is not None:
                    lengths = decoded(text, _WekaLengths, place)
                    if not sample.takes(lengths.id):
                        sample.leave(lengths.num_tokens)
                        yield []
                        continue
                session = decoded(text, _WekaSession, place)
                _weka_requests(session, session.requests, session.id, place, found)
            except ConfigError as error:
                skip(broken, error)
                continue
            if found:
                yield found


def _documents(path: Path, broken: Broken | None) -> Iterator[tuple[str, bytes]]:
    """Of a tar its documents; of lines each; else all."""
    if is_tar(path):
        for name, text in members(path, broken):
            rows = [text] if name.endswith(".json") else text.splitlines()
            for row in filter(bytes.strip, rows):
                yield f"{path}, {name}", row
        return
    lines_of = lines(path, broken)
    place, first = next(lines_of, ("", b""))
    if not first:
        return
    if not _is_json(first):
        text = whole(path)
        if broken is None or _is_json(text):
            yield f"{path}", text
            return
    yield place, first
    yield from lines_of


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except NOT_JSON:
        return False
    return True


def _weka_requests(
    session: _WekaSession, requests: list[_WekaRequest], name: str, place: str, found: Session
) -> None:
    """Append those of a session and of those nested in it, each of which is one of its own.

    A nested one runs beside the one that it is in. That this one waits for it is kept only as the
    time that it thinks before its next request.
    """
    scope = "" if session.hash_id_scope == "global" else f"{session.id}/"
    turn, ended_s = 0, 0.0
    for number, each in enumerate(requests, start=1):
        where = f"{place}, request {number} of {name}"
        if each.requests is not None:
            _weka_requests(session, each.requests, f"{name}/{number}", place, found)
            continue
        if each.num_in is None:
            raise ConfigError(f"{where}: it has no `in`, the length of its prompt")
        num_whole = each.num_in // session.block_size
        if not num_whole <= len(each.hash_ids) <= num_whole + 1:
            raise ConfigError(
                f"{where}: {len(each.hash_ids)} hash ids are not the blocks of "
                f"{session.block_size} tokens of a prompt of {each.num_in}"
            )
        think_s = each.t - ended_s if each.think_time is None else each.think_time
        ended_s = each.t + (each.api_time or 0.0)
        found.append(
            TracedRequest(
                session=name,
                turn=turn,
                pieces=blocks(
                    each.hash_ids[:num_whole],
                    each.num_in,
                    session.block_size,
                    scope,
                    f"{name}/tail/{turn}",
                ),
                output_tokens=each.num_out,
                think_s=max(0.0, think_s) if turn else 0.0,  # rounded times may go back
            )
        )
        turn += 1


class _Message(msgspec.Struct):
    conversation_id: str
    role: str
    system: Any = None
    tools: Any = None
    content: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    tool_results: Any = None
    delay_seconds: _Seconds = 0.0

    def texts(self) -> Iterator[str]:
        """What a model reads of it, in order."""
        for part in (
            *(self.system, self.tools, self.reasoning_content, self.content),
            *(self.tool_calls, self.tool_results),
        ):
            if part:
                yield part if isinstance(part, str) else json.dumps(part, sort_keys=True)


def mlcommons(path: Path, broken: Broken | None = None) -> Iterator[Session]:
    """Conversations: what an assistant said is asked for, and all before it is the prompt.

    Tokens are estimated as characters / 4; a chat template's are not there. Raises ConfigError; of
    a broken message that is only counted, nothing is in the prompts after it.
    """
    name, think_s = "", 0.0
    found: Session = []
    pieces: list[tuple[str, int]] = []
    for place, line in lines(path, broken):
        try:
            message = decoded(line, _Message, place)
        except ConfigError as error:
            skip(broken, error)
            continue
        if message.conversation_id != name:
            if found:
                yield found
            name, found, pieces = message.conversation_id, [], []
        said: list[tuple[str, int]] = []
        for text in message.texts():
            before = (said or pieces or [("", 0)])[-1][0]
            said.append((digest(before + text), -(-len(text) // CHARACTERS_A_TOKEN)))
        if message.role != "assistant":
            think_s = message.delay_seconds
        elif not pieces:
            skip(broken, ConfigError(f"{place}: an assistant answers before anybody asked"))
        else:
            found.append(
                TracedRequest(
                    session=name,
                    turn=len(found),
                    pieces=tuple(pieces),
                    output_tokens=sum(count for _, count in said),
                    think_s=think_s if found else 0.0,
                )
            )
        pieces += said
    if found:
        yield found


class _Said(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    text: str = msgspec.field(name="value")


class _Chat(msgspec.Struct):
    conversations: list[_Said]


def sharegpt(path: Path, broken: Broken | None = None) -> Iterator[Session]:
    """Conversations: each answer is asked for, and all before it is the prompt.

    Tokens are estimated as characters / 4. A session is named by its number: parts of a long one
    have names of their own in such files. Raises ConfigError.
    """
    number = 0
    for file in files_of(path):
        for place, text in _documents(file, broken):
            try:
                rows = _elements(text, place)
            except ConfigError as error:
                skip(broken, error)
                continue
            for index, row in enumerate(rows, start=1):
                where = place if len(rows) == 1 else f"{place}, conversation {index}"
                number += 1
                try:
                    found = _chat(f"{number}", decoded(bytes(row), _Chat, where))
                except ConfigError as error:
                    skip(broken, error)
                    continue
                if found:
                    yield found


def _elements(text: bytes, place: str) -> list[msgspec.Raw]:
    """Of an array; of anything else itself. Raises ConfigError."""
    if not text.lstrip().startswith(b"["):
        return [msgspec.Raw(text)]
    return decoded(text, list[msgspec.Raw], place)


def _chat(name: str, chat: _Chat) -> Session:
    found: Session = []
    pieces: list[tuple[str, int]] = []
    for said in chat.conversations:
        before = pieces[-1][0] if pieces else ""
        answer: list[tuple[str, int]] = []
        for start in range(0, len(said.text), _PIECE):
            part = said.text[start : start + _PIECE]
            before = digest(before + part)
            answer.append((before, -(-len(part) // CHARACTERS_A_TOKEN)))
        if said.speaker in _ANSWERS and pieces:
            found.append(
                TracedRequest(
                    session=name,
                    turn=len(found),
                    pieces=tuple(pieces),
                    output_tokens=sum(count for _, count in answer),
                )
            )
        pieces += answer
    return found
