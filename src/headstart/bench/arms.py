"""What is compared: the arms of a campaign, each a server that the bench starts and ends itself.

    none         vLLM without its prefix cache
    gpu-prefix   vLLM with its own prefix cache: the baseline that counts
    headstart    vLLM with the connector, and a node of its own
    {...}        vLLM with this --kv-transfer-config
    words        any server's whole command

In what an arm is given, `{port}` stands for the port to serve at, and `{socket}` for the socket of
a node that the bench starts for this arm alone.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.engines.vllm.command import headstart_arguments, server_words
from headstart.errors import ConfigError

PORT, SOCKET = "{port}", "{socket}"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_NAME = 60
_OWN_CACHE = "--enable-prefix-caching"
_NO_CACHE = "--no-enable-prefix-caching"
_TRANSFER = "--kv-transfer-config"
_PRESETS: dict[str, tuple[str, ...]] = {
    "none": (_NO_CACHE,),
    "gpu-prefix": (_OWN_CACHE,),
    "headstart": (_OWN_CACHE, *headstart_arguments((), node=SOCKET)),
}
_TELL_HITS = "--enable-prompt-tokens-details"
_ARMS_OWN = ("--port", "--host", _TRANSFER, _OWN_CACHE, _NO_CACHE)
"""What the words for all of an arm's servers may not set: it is what arms differ in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to serve."""

    name: str
    words: tuple[str, ...]
    """Its command, with `{port}` and perhaps `{socket}`."""
    has_prefix_cache: bool | None = None
    """Whether the engine's own prefix cache is on; None: not known."""

    @property
    def has_node(self) -> bool:
        """Whether it wants a node."""
        return any(SOCKET in word for word in self.words)

    def command(self, port: int, socket: Path | None) -> list[str]:
        """Its command for a port, and for the socket of its node if it has one."""
        return [word.replace(PORT, str(port)).replace(SOCKET, str(socket)) for word in self.words]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vllm:
    """What the arms that are vLLM have in common."""

    model: str = ""
    """Empty: no arm may be one."""
    words: tuple[str, ...] = ()
    """More words for `vllm serve`."""


def parse_arms(
    texts: Sequence[str], vllm: Vllm, *, has_prefix_cache: bool | None = None
) -> list[Arm]:
    """The arms of `NAME=WHAT`. `has_prefix_cache`: of the servers given by their command.

    Raises ConfigError.
    """
    _check_words(vllm.words)
    arms = [_parse(text, vllm, has_prefix_cache) for text in texts]
    names = [arm.name for arm in arms]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"--arm {twice[0]} is there twice; give each arm a name of its own")
    if (vllm.model or vllm.words) and not any(_is_vllm(_what(text)) for text in texts):
        raise ConfigError(
            f"--serve-model and what follows a lone -- are for the arms {_known()}; a command has "
            "all its words already"
        )
    return arms


def _parse(text: str, vllm: Vllm, has_prefix_cache: bool | None) -> Arm:
    name, what = text.partition("=")[0], _what(text)
    check_name(name)
    if not _is_vllm(what):
        words = _command_words(name, what)
        return Arm(name=name, words=words, has_prefix_cache=has_prefix_cache)
    if not vllm.model:
        raise ConfigError(f"--arm {name}: name the model to serve with --serve-model")
    chosen = _PRESETS.get(what) or (_OWN_CACHE, _TRANSFER, _transfer(name, what))
    told = () if _TELL_HITS in vllm.words else (_TELL_HITS,)
    served = (*server_words(vllm.model), "--host", "127.0.0.1", "--port", PORT)
    return Arm(
        name=name,
        words=(*served, *told, *chosen, *vllm.words),
        has_prefix_cache=_NO_CACHE not in chosen,
    )


def check_name(name: str) -> None:
    """Raises ConfigError where an arm cannot be called so: FILE#ARM/PHASE and folders name it."""
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise ConfigError(
            f"--arm: the name {name!r} must be letters, digits, '.', '_' and '-', at most "
            f"{_MAX_NAME}, and begin with a letter or digit"
        )


def _what(text: str) -> str:
    return text.partition("=")[2].strip()


def _is_vllm(what: str) -> bool:
    return what in _PRESETS or what.startswith("{")


def _known() -> str:
    return f"{', '.join(_PRESETS)} and {{...}}"


def _command_words(name: str, what: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(what))
    except ValueError as error:
        raise ConfigError(f"--arm {name}: the command cannot be split: {error}") from error
    if not any(PORT in word for word in words):
        raise ConfigError(
            f"--arm {name}: {what!r} is none of {_known()}, and as a server's command it must say "
            f"{PORT} where its port goes"
        )
    return words


def _transfer(name: str, what: str) -> str:
    try:
        json.loads(what)
    except ValueError as error:
        raise ConfigError(f"--arm {name}: the --kv-transfer-config is not JSON: {error}") from error
    return what


def _check_words(words: Sequence[str]) -> None:
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if flag in _ARMS_OWN:
            raise ConfigError(
                f"{flag} is what the arms set themselves; for another server give an arm its whole "
                "command"
            )
