"""A node of the bench's own, for one arm: started, emptied and ended as the phases ask."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headstart.bench.orphans import bound
from headstart.config import load_settings, node_settings, own_node_environment
from headstart.errors import ConfigError, HeadstartError
from headstart.node import protocol
from headstart.node.client import command
from headstart.node.launch import START_S, is_running
from headstart.settings import Settings

_LOG_LINES = 5
_POLL_S = 0.05
_ASK_S = 10.0
_CLEAR_S = 600.0
_WRITTEN_S = 600.0
_END_S = 90.0
"""A node writes what is queued for 30 s, and closes."""


def settings_for(folder: Path, config: Path | None) -> tuple[Settings, list[Path]]:
    """Settings of a node and the folders of its tiers, which nobody else uses.

    They lie in `folder`, or in the tiers' roots where `config` names those. Raises ConfigError.
    """
    if config is None:
        # As a node without settings would have them, on the disk of `folder`.
        settings = node_settings(environ={"HEADSTART_CACHE_DIR": str(folder)})
        return settings, [tier.root for tier in settings.tiers]
    settings = load_settings(config, environ={})
    if any(tier.device is not None for tier in settings.tiers):
        raise ConfigError(
            f"--node-config {config}: a node of the bench keeps its blocks in files of its own; "
            "leave out `device`"
        )
    name = f"{folder.parent.name}-{folder.name}"
    return settings, [tier.root / name for tier in settings.tiers]


class OwnNode:
    """`headstart node run` as a child. Not started yet; ended by `stop` or `remove`."""

    def __init__(self, name: str, socket: Path, folder: Path, config: Path | None) -> None:
        """`folder` is the arm's; `name` is what is said of it. Raises ConfigError."""
        self._name, self._socket = name, socket
        settings, self._roots = settings_for(folder, config)
        self._environ = own_node_environment(settings, self._roots)
        self._arguments = [] if config is None else ["--config", str(config.absolute())]
        self._log = folder / "node.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers. Raises HeadstartError with its last words."""
        for root in self._roots:
            try:
                root.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{root.parent}: {error.strerror}") from error
        node = [sys.executable, "-P", "-m", "headstart", "node", "run"]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                bound([*node, "--socket", str(self._socket), *self._arguments]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environ,
                start_new_session=True,
            )
        self._wait_for(lambda: is_running(self._socket), "does not come up", START_S)

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None
        return self._process.pid

    def check(self) -> None:
        """Raises HeadstartError, with its log, when it has ended."""
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            raise HeadstartError(self._failure(f"ended with exit code {code}"))

    def status(self) -> Mapping[str, Any]:
        """What `headstart node status` shows. Raises HeadstartError."""
        reply = self._command(protocol.Status(), _ASK_S)
        if not isinstance(reply, protocol.State):
            raise HeadstartError(self._failure("does not tell its state"))
        return reply.fields

    @property
    def num_engines(self) -> int:
        """Engines that are connected to it and can copy."""
        gauges = self.status()["gauges"]
        return min(int(gauges["engines"]), int(gauges["workers"]))

    def loaded_nbytes(self) -> int:
        """That it has read from its tiers on devices, by its own count, since it started."""
        tiers = self.status()["tiers"].items()
        return sum(int(tier["read_nbytes"]) for name, tier in tiers if name != "memory")

    def clear(self) -> None:
        """Forget all blocks. Raises HeadstartError."""
        reply = self._command(protocol.Clear(), _CLEAR_S)
        if not isinstance(reply, protocol.Done):
            raise HeadstartError(self._failure("does not forget its blocks"))

    def settle(self) -> None:
        """Wait until all that was stored is on its devices, too. Raises HeadstartError."""

        def is_written() -> bool:
            told = self.status()
            return not told["gauges"]["reservations"] and not told["loads"]["queued_nbytes"]

        self._wait_for(is_written, f"has not written its blocks after {_WRITTEN_S:g} s", _WRITTEN_S)

    def stop(self) -> None:
        """End it as an operator does: what is queued is written. Raises HeadstartError."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired as error:
            raise HeadstartError(self._failure(f"does not end within {_END_S:g} s")) from error
        self._process = None

    def remove(self) -> None:
        """End it at once, and give its disk space back. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for root in self._roots:
            shutil.rmtree(root, ignore_errors=True)

    def _wait_for(self, holds: Callable[[], bool], failure: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            self.check()
            if time.monotonic() > deadline:
                raise HeadstartError(self._failure(failure))
            time.sleep(_POLL_S)

    def _command(self, message: protocol.Request, timeout_s: float) -> protocol.Reply:
        try:
            return command(self._socket, message, timeout_s)
        except OSError as error:
            self.check()
            raise HeadstartError(self._failure(f"does not answer: {error}")) from error

    def _failure(self, what: str) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return f"the node of arm {self._name} {what}; its log {self._log} ends with:\n" + (
            "\n".join(lines) or "(nothing)"
        )
