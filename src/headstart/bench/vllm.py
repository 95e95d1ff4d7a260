"""A `vllm serve` process, and questions to it whose first token is timed.

Questions are token ids, so that every engine computes the same prompt, and answers are token ids,
so that they can be compared. Times are the client's, from the request's first byte sent to the
first token received: what a user sees, whatever the engine counts it as.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from headstart.errors import HeadstartError

START_S = 300.0
_STOP_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer."""

    tokens: tuple[int, ...]
    ttft_s: float
    seconds: float
    cached_tokens: int
    """Prompt tokens that the engine did not compute, its own hits and loaded ones."""


class VllmServer:
    """One running server. Made by `serving`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self._log = process, port, log

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Wait until it answers. Raises HeadstartError, with its log, when it does not."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.request("GET", "/health", timeout_s=2.0)[0] == 200:
                    return
            time.sleep(0.2)
        raise HeadstartError(f"vLLM does not come up; its log ends with:\n{self.log_tail()}")

    def log_tail(self, num_lines: int = 30) -> str:
        """The last lines of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-num_lines:])

    def request(
        self, method: str, path: str, body: object = None, *, timeout_s: float = 600.0
    ) -> tuple[int, bytes]:
        """One HTTP exchange: status and body."""
        with self._connection(timeout_s) as connection:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()

    def ask(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 1,
        ignore_eos: bool = True,
        timeout_s: float = 1200.0,
    ) -> Reply:
        """Answer a prompt greedily, `max_tokens` long, or less where an end token may end it."""
        body = {
            "model": "model",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        with self._connection(timeout_s) as connection:
            connection.connect()
            started = time.perf_counter()
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                raise HeadstartError(f"vLLM answered {response.status}: {response.read()[:500]!r}")
            return _read_stream(response, started)

    def counters(self, start: str) -> dict[str, float]:
        """The counters in its /metrics whose name starts so, without their labels but `tier`."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.request("GET", "/metrics")[1].decode()):
            for sample in family.samples:
                if sample.name.startswith(start) and sample.name.endswith("_total"):
                    name = sample.name.removesuffix("_total").removeprefix(start)
                    name += f"_{tier}" if (tier := sample.labels.get("tier")) else ""
                    found[name] = found.get(name, 0.0) + sample.value
        return found

    def reset_prefix_cache(self) -> None:
        """Empty the engine's own cache; needs VLLM_SERVER_DEV_MODE=1."""
        status, answer = self.request("POST", "/reset_prefix_cache")
        if status != 200:
            raise HeadstartError(f"the engine's cache was not reset: {answer[:200]!r}")

    @contextmanager
    def _connection(self, timeout_s: float) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            yield connection
        finally:
            connection.close()


@contextmanager
def serving(
    command: Sequence[str], *, environ: Mapping[str, str], log: Path
) -> Iterator[VllmServer]:
    """Run `command`, a `vllm serve` without a port, for as long as the block runs.

    The model is served under the name "model". Raises HeadstartError when it does not come up.
    """
    port = free_port()
    words = [*command, "--port", str(port), "--served-model-name", "model"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environ),
            start_new_session=True,
        )
    try:
        server = VllmServer(process, port, log)
        server.wait_ready()
        yield server
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and everything that it started."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """A port of the loopback interface that nobody listens at."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _read_stream(response: http.client.HTTPResponse, started: float) -> Reply:
    """The answer in a stream of server-sent events."""
    tokens: list[int] = []
    ttft_s = cached = 0.0
    for line in response:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            raise HeadstartError(f"vLLM failed: {event['error']}")
        for choice in event.get("choices", ()):
            if choice.get("token_ids"):
                ttft_s = ttft_s or time.perf_counter() - started
                tokens += choice["token_ids"]
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or cached
    return Reply(
        tokens=tuple(tokens),
        ttft_s=ttft_s,
        seconds=time.perf_counter() - started,
        cached_tokens=int(cached),
    )
