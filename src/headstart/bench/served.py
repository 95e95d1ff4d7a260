"""An arm at work: a server, with its node if it has one, made ready for a phase and measured."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from headstart.bench.arms import Arm
from headstart.bench.counters import (
    cpu_s,
    family,
    forget_peaks,
    hits_by_tier,
    loaded_tokens,
    peak_memory_nbytes,
    read_nbytes,
)
from headstart.bench.drive import Advance, Target
from headstart.bench.nodes import OwnNode
from headstart.bench.phases import Phase, drop_page_cache
from headstart.bench.run import Run
from headstart.bench.serve import Load, measure, warm_up
from headstart.bench.server import START_S, OwnServer, reset_prefix_cache
from headstart.config import server_environment
from headstart.errors import ConfigError, HeadstartError

_Number = TypeVar("_Number", int, float)
_COME_BACK_S = 60.0
_COME_BACK_POLL_S = 0.5


class Served(Protocol):
    """What a campaign measures.

    `start`, then for each phase `ready`, `run` and `settle`, then `end`, which may come at any
    time and more than once; after it `start` again.
    """

    name: str

    def start(self) -> None:
        """Serve. Raises HeadstartError."""
        ...

    def ready(self, phase: Phase, load: Load) -> None:
        """Do what the phase asks for, and warm up what is new. Raises HeadstartError."""
        ...

    def run(self, phase: Phase, load: Load, salt: str, advance: Advance) -> Run:
        """Send the load once. Raises HeadstartError where nothing can be reached."""
        ...

    def settle(self) -> None:
        """Wait until nothing of the run goes on. Raises HeadstartError when something has died."""
        ...

    def end(self) -> None:
        """Serve no longer, and keep nothing."""
        ...


class RemoteServer:
    """A server that somebody else runs; see `Served`."""

    def __init__(self, target: Target, name: str, *, has_prefix_cache: bool | None) -> None:
        self.name = name
        self._target, self._has_prefix_cache = target, has_prefix_cache

    def start(self) -> None:
        """See `Served.start`."""

    def ready(self, phase: Phase, load: Load) -> None:
        """See `Served.ready`."""
        if phase in (Phase.ONLY, Phase.COLD):
            warm_up(load, self._target)
        if phase is Phase.COLD and not reset_prefix_cache(self._target.url, self._target.api_key):
            raise ConfigError(
                f"{self._target.url} does not empty its cache by POST /reset_prefix_cache (vLLM "
                "has it with VLLM_SERVER_DEV_MODE=1); start it so, or leave out --phases: with "
                "another --salt every load is new to it"
            )

    def run(self, phase: Phase, load: Load, salt: str, advance: Advance) -> Run:
        """See `Served.run`."""
        run = measure(load, self._target, salt, advance, is_again=phase.is_again)
        return msgspec.structs.replace(
            run, arm=self.name, phase=str(phase), has_prefix_cache=self._has_prefix_cache
        )

    def settle(self) -> None:
        """See `Served.settle`."""

    def end(self) -> None:
        """See `Served.end`."""


class ServedArm:
    """Server and node of an arm; see `Served`."""

    def __init__(self, arm: Arm, server: OwnServer, node: OwnNode | None, target: Target) -> None:
        """`target` without its URL, which the server chooses."""
        self.name = arm.name
        self._arm, self._server, self._node, self._target = arm, server, node, target
        self._is_new = self._is_used = False

    def start(self) -> None:
        """See `Served.start`."""
        if self._node is not None:
            self._node.start()
        self._start_server()

    def ready(self, phase: Phase, load: Load) -> None:
        """See `Served.ready`."""
        self._server.check()
        if phase.is_restart:
            self._restart(phase)
        self._warm_up(load)
        if phase is Phase.COLD:
            self._forget()
            self._warm_up(load)
            if self._node is not None:
                self._node.clear()

    def run(self, phase: Phase, load: Load, salt: str, advance: Advance) -> Run:
        """See `Served.run`."""
        self._is_used = True
        can_tell_peak = forget_peaks(self._pids())
        before = self._read()
        run = measure(load, self._at(), salt, advance, is_again=phase.is_again)
        after = self._read()
        is_cold = phase is Phase.HOST_COLD
        return msgspec.structs.replace(
            run,
            arm=self.name,
            phase=str(phase),
            has_prefix_cache=self._arm.has_prefix_cache,
            cpu_s=_grown(before.cpu_s, after.cpu_s),
            peak_memory_nbytes=peak_memory_nbytes(self._pids()) if can_tell_peak else None,
            hit_tokens_by_tier=hits_by_tier(run.requests, before.tokens, after.tokens),
            read_nbytes=_grown(before.read_nbytes, after.read_nbytes) if is_cold else None,
            loaded_nbytes=_grown(before.loaded_nbytes, after.loaded_nbytes) if is_cold else None,
        )

    def settle(self) -> None:
        """See `Served.settle`."""
        self._server.check()
        if self._node is not None:
            self._node.settle()

    def end(self) -> None:
        """See `Served.end`."""
        try:
            self._server.stop()
        finally:
            if self._node is not None:
                self._node.remove()

    def _restart(self, phase: Phase) -> None:
        """End and start what the phase says."""
        is_engine, is_node = phase is not Phase.NODE_RESTART, phase is not Phase.ENGINE_RESTART
        if is_engine:
            self._server.stop()
        if is_node and self._node is not None:
            self._node.stop()
        if phase is Phase.HOST_COLD:
            drop_page_cache()
        if is_node and self._node is not None:
            self._node.start()
        if is_engine:
            self._start_server()
        else:
            self._forget()
            self._is_new = True  # to its node

    def _start_server(self) -> None:
        self._server.start()
        self._is_new, self._is_used = True, False

    def _forget(self) -> None:
        """Empty the engine's own cache: by asking, else by starting it anew."""
        if not self._server.forget() and self._is_used:
            self._server.stop()
            self._start_server()

    def _warm_up(self, load: Load) -> None:
        """Once after each start; an engine finds its node with a request."""
        if not self._is_new:
            return
        warm_up(load, self._at(), at_least=0 if self._node is None else 1)
        deadline = time.monotonic() + _COME_BACK_S
        while self._node is not None and not self._node.num_engines:
            if time.monotonic() > deadline:
                raise HeadstartError(
                    f"arm {self.name}: no engine has come to its node within {_COME_BACK_S:g} s; "
                    "does its server use the socket that {socket} stands for?"
                )
            time.sleep(_COME_BACK_POLL_S)
            warm_up(load, self._at(), at_least=1)
        self._is_new = False

    def _at(self) -> Target:
        return replace(self._target, url=self._server.url)

    def _pids(self) -> list[int]:
        roots = [self._server.pid] + ([] if self._node is None else [self._node.pid])
        return family(roots)

    def _read(self) -> _Reading:
        """Counters as they are now; what has died tells nothing."""
        pids = self._pids()
        loaded = None
        if self._node is not None:
            with contextlib.suppress(HeadstartError):
                loaded = self._node.loaded_nbytes()
        return _Reading(
            cpu_s=cpu_s(pids),
            tokens=loaded_tokens(self._server.metrics()),
            read_nbytes=read_nbytes(pids if self._node is None else [self._node.pid]),
            loaded_nbytes=loaded,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """Counters of an arm's processes at a moment."""

    cpu_s: float
    tokens: dict[str, int] | None
    read_nbytes: int | None
    """To the node alone if there is one: pages of the engine's weights are no blocks."""
    loaded_nbytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where and how arms are served."""

    root: Path
    """Folder for logs, and for the blocks of nodes whose settings name no place."""
    node_config: Path | None = None
    start_s: float = START_S


@contextmanager
def arms_served(arms: Sequence[Arm], place: Place, target: Target) -> Iterator[list[ServedArm]]:
    """The arms, not started yet, with folders for as long as the block runs.

    Who starts one ends it. Logs stay only where the block failed. Raises ConfigError.
    """
    try:
        place.root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=place.root, prefix="serve-")).absolute()
    except OSError as error:
        raise ConfigError(f"--root {place.root}: {error.strerror}") from error
    # The path of a socket has at most 107 bytes: it does not go with the rest.
    with tempfile.TemporaryDirectory(prefix="headstart-") as sockets:
        yield [
            _served(arm, folder / arm.name, Path(sockets) / f"{number}.sock", place, target)
            for number, arm in enumerate(arms)
        ]
    shutil.rmtree(folder, ignore_errors=True)


def _served(arm: Arm, folder: Path, socket: Path, place: Place, target: Target) -> ServedArm:
    folder.mkdir()
    server = OwnServer(
        arm.name,
        lambda port: arm.command(port, socket),
        environ=server_environment(),
        log=folder / "server.log",
        api_key=target.api_key,
        start_s=place.start_s,
    )
    node = OwnNode(arm.name, socket, folder, place.node_config) if arm.has_node else None
    return ServedArm(arm, server, node, target)


def _grown(before: _Number | None, after: _Number | None) -> _Number | None:
    """What a counter has grown by; None where it is not told, or has begun anew."""
    if before is None or after is None or after < before:
        return None
    return after - before
