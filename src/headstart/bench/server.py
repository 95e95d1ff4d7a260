"""An OpenAI-compatible server that the bench starts, empties and ends, whatever it is."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headstart.bench.orphans import bound
from headstart.bench.vllm import free_port, stop
from headstart.errors import ConfigError, HeadstartError

START_S = 600.0
_LOG_LINES = 12
_POLL_S = 0.1
_ASK_S = 5.0
_RESET_S = 30.0
# Whatever proxy is set is for other servers.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class OwnServer:
    """A server process in a session of its own. Not started yet; ended by `stop`."""

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        *,
        environ: Mapping[str, str],
        log: Path,
        api_key: str = "",
        start_s: float = START_S,
    ) -> None:
        """`command` gives its words for a port; `name` is the arm's, for what is said of it."""
        self._name, self._command = name, command
        self._environ, self._log = dict(environ), log
        self._api_key, self._start_s = api_key, start_s
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        """Start it at a free port and wait until it lists its models.

        Raises HeadstartError with the last lines of its log when it ends or does not answer in
        time, and ConfigError when there is no such command.
        """
        port = free_port()
        words = list(self._command(port))
        if shutil.which(words[0], path=self._environ.get("PATH")) is None:
            raise ConfigError(
                f"arm {self._name}: {words[0]!r} cannot be started: No such file that can be run"
            )
        try:
            with self._log.open("ab") as output:
                self._process = subprocess.Popen(
                    bound(words),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self._environ,
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(
                f"arm {self._name}: {words[0]!r} cannot be started: {error.strerror}"
            ) from error
        self.url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + self._start_s
        while not self._answers():
            self.check()
            if time.monotonic() > deadline:
                raise HeadstartError(
                    f"the server of arm {self._name} does not answer at /v1/models within "
                    f"{self._start_s:g} s; {self._last_words()}"
                )
            time.sleep(_POLL_S)

    @property
    def pid(self) -> int:
        """Of the process that was started; the root of its processes."""
        assert self._process is not None
        return self._process.pid

    def check(self) -> None:
        """Raises HeadstartError, with its log, when it has ended."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise HeadstartError(
                f"the server of arm {self._name} ended with exit code {code}; {self._last_words()}"
            )

    def forget(self) -> bool:
        """Empty its prefix cache; False: it has no way to be asked."""
        return reset_prefix_cache(self.url, self._api_key)

    def metrics(self) -> str | None:
        """Its page of metrics; None: it has none."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, body = _ask("GET", f"{self.url}/metrics", self._api_key)
            return body.decode(errors="replace") if status == http.HTTPStatus.OK else None
        return None

    def stop(self) -> None:
        """End it and everything that it started. Idempotent."""
        if self._process is not None:
            stop(self._process)
            self._process = None

    def _answers(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return _ask("GET", f"{self.url}/v1/models", self._api_key)[0] == http.HTTPStatus.OK
        return False

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return f"its log {self._log} ends with:\n" + ("\n".join(lines) or "(nothing)")


def reset_prefix_cache(url: str, api_key: str = "") -> bool:
    """Empty a server's own prefix cache; False: it cannot be asked to, or does not do it.

    vLLM has the path with VLLM_SERVER_DEV_MODE=1 only, and refuses while blocks are in use. Raises
    HeadstartError when the server cannot be reached.
    """
    deadline = time.monotonic() + _RESET_S
    while time.monotonic() < deadline:
        try:
            status, body = _ask("POST", f"{url}/reset_prefix_cache", api_key, _RESET_S)
        except (OSError, http.client.HTTPException) as error:
            raise HeadstartError(f"{url} cannot be reached: {error}") from error
        if status < http.HTTPStatus.INTERNAL_SERVER_ERROR and status != http.HTTPStatus.OK:
            return False
        if status == http.HTTPStatus.OK and _is_done(body):
            return True
        time.sleep(_POLL_S)
    return False


def _is_done(body: bytes) -> bool:
    """Some answer nothing, some {"success": true}."""
    try:
        told = json.loads(body)
    except ValueError:
        return True
    return not isinstance(told, dict) or told.get("success") is not False


def _ask(method: str, url: str, api_key: str, timeout_s: float = _ASK_S) -> tuple[int, bytes]:
    """One HTTP exchange: status and body. Raises OSError or HTTPException."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with _open(request, timeout=timeout_s) as answer:
            return int(answer.status), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
