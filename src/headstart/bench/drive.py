"""Drives a load against an OpenAI-compatible streaming server, and times what comes.

Open loop: sessions start at random times of a rate (Poisson), or each request at its trace's time,
whatever the server does, and times count from when a request should have been sent: a client that
waits for a slow server would hide its queue. Closed loop: so many sessions at once. Turns of one
session follow each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import resource
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from headstart.bench.load import Ask
from headstart.bench.run import Request
from headstart.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

Advance = Callable[[int], None]
Meet = Callable[[], float]
"""Waits for other clients, and gives the common start by `time.perf_counter`."""
_MAX_ERROR = 200
_REACH_S = 60.0
_DRAIN_S = 1.0
_NUM_FILES = 65_536
_LINE_NBYTES = 64 << 20
"""vLLM sends the prompt's token ids with the first event: a million of them are 8 MB."""
_DONE = "[DONE]"
_ARRIVALS_SEED = "arrivals"
_GAP_DIGITS = 6
"""Microseconds: there is one of these numbers a token, in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server."""

    url: str
    """Up to and without /v1."""
    model: str = ""
    """Empty: its only one."""
    timeout_s: float = 600.0
    api_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a load is sent: one of the first three. Raises ConfigError."""

    rate: float | None = None
    """Sessions that start a second."""
    concurrency: int | None = None
    """Sessions at once."""
    is_timed: bool = False
    """Each request at the time that it has in its trace."""
    processes: int = 1
    """That send it."""
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.rate is not None) + (self.concurrency is not None) + self.is_timed != 1:
            raise ConfigError(
                "a load is sent at a rate, by so many sessions at once, or at the times of its "
                "trace: name one"
            )
        if self.rate is not None and not 0.0 < self.rate < math.inf:
            raise ConfigError(f"a rate of {self.rate} sessions a second")

    def told(self) -> dict[str, float | None]:
        """What a run says of it: no more than what makes runs incomparable."""
        found: dict[str, float | None] = {"rate": self.rate, "concurrency": self.concurrency}
        if self.is_timed:
            found["trace_time"] = 1.0
        if self.processes > 1:
            found["processes"] = self.processes
        return found


class _Wrong(Exception):
    """An answer that is none, in a few words."""


def starts_of(asks: Sequence[Ask], pace: Pace) -> dict[str, float]:
    """When each session is due, in seconds since the start; empty in a closed loop.

    Raises ConfigError where a trace's times are asked for and it has none.
    """
    starts: dict[str, float] = {}
    if pace.is_timed:
        for ask in asks:
            if ask.at_s is None:
                raise ConfigError(
                    "this load has no times of its own, so it cannot be sent at them; use a rate "
                    "or a concurrency"
                )
            starts.setdefault(ask.session, ask.at_s)
    elif pace.rate is not None:
        rng = random.Random(f"{_ARRIVALS_SEED}/{pace.seed}")
        at_s = 0.0
        for ask in asks:
            if ask.session not in starts:
                starts[ask.session] = at_s
                at_s += rng.expovariate(pace.rate)
    return starts


async def drive(
    asks: Sequence[Ask],
    target: Target,
    pace: Pace,
    advance: Advance = lambda done: None,
    *,
    starts: Mapping[str, float] | None = None,
    meet: Meet = time.perf_counter,
) -> tuple[list[Request], float]:
    """Send everything from this process; what came of each ask, in order, and seconds in all.

    `starts`: when each session of an open loop is due, by default as `starts_of` has it. Raises
    ConfigError where the server cannot be reached at all.
    """
    starts = starts_of(asks, pace) if starts is None else starts
    _allow_files()
    try:
        import aiohttp
    except ModuleNotFoundError as error:
        raise ConfigError("a load needs aiohttp: pip install 'headstart[bench]'") from error
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=connector, read_bufsize=_LINE_NBYTES
    ) as session:
        model, server = await _reach(session, target)
        body = {
            "model": model,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if server == "vllm":  # others may refuse what they do not know
            body["return_token_ids"] = True
        driver = _Driver(session, asks, f"{target.url}/v1/completions", body, advance)
        started = meet()
        if pace.concurrency is None:
            return await driver.open_loop(starts, started, is_timed=pace.is_timed)
        return await driver.closed_loop(pace.concurrency, started)


def _allow_files() -> None:
    """A connection a request in flight: more than the 1,024 files that a shell allows at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NUM_FILES if hard == resource.RLIM_INFINITY else min(_NUM_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _models(session: aiohttp.ClientSession, target: Target) -> dict[str, str]:
    """The models that a server has, and what serves each. Raises ConfigError."""
    import aiohttp

    limit = aiohttp.ClientTimeout(total=min(_REACH_S, target.timeout_s))
    try:
        async with session.get(f"{target.url}/v1/models", timeout=limit) as response:
            if response.status != 200:
                raise ConfigError(
                    f"{target.url}/v1/models answers {response.status}: "
                    f"{(await response.text())[:_MAX_ERROR]}"
                )
            found = (await response.json())["data"]
            return {str(each["id"]): str(each.get("owned_by")) for each in found}
    except ConfigError:
        raise
    except TimeoutError as error:
        raise ConfigError(
            f"{target.url} cannot be reached: it does not list its models within {limit.total:g} s"
        ) from error
    except aiohttp.ContentTypeError as error:
        told = error.headers.get("Content-Type") if error.headers else None
        raise ConfigError(f"{target.url}/v1/models is no list of models, but {told}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ConfigError(f"{target.url} cannot be reached: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{target.url}/v1/models is no list of models: {error}") from error


async def _reach(session: aiohttp.ClientSession, target: Target) -> tuple[str, str]:
    """The model's name, the only one if none is named, and what serves it. Raises ConfigError."""
    known = await _models(session, target)
    if not known:
        raise ConfigError(f"{target.url} has no models")
    if not target.model and len(known) > 1:
        raise ConfigError(f"{target.url} has several models, name one: {', '.join(known)}")
    name = target.model or next(iter(known))
    if name not in known:
        raise ConfigError(f"{target.url} has no model {name!r}; it has: {', '.join(known)}")
    return name, known[name]


class _Driver:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        asks: Sequence[Ask],
        url: str,
        body: dict[str, object],
        advance: Advance,
    ) -> None:
        self._session, self._url, self._body = session, url, body
        self._advance, self._num_done = advance, 0
        self._requests: list[Request | None] = [None] * len(asks)
        self._asks = asks
        self._sessions: dict[str, list[int]] = {}
        for number, ask in enumerate(asks):
            self._sessions.setdefault(ask.session, []).append(number)
        self._started = 0.0

    async def open_loop(
        self, starts: Mapping[str, float], started: float, *, is_timed: bool
    ) -> tuple[list[Request], float]:
        self._started = started
        await asyncio.gather(
            *(
                self._converse(numbers, starts[session], is_timed=is_timed)
                for session, numbers in self._sessions.items()
            )
        )
        return self._found()

    async def closed_loop(self, concurrency: int, started: float) -> tuple[list[Request], float]:
        self._started = started
        await asyncio.sleep(max(0.0, -self._now()))
        waiting = iter(self._sessions.values())

        async def work() -> None:
            for numbers in waiting:  # one iterator: each session is taken once
                await self._converse(numbers, self._now())

        await asyncio.gather(*(work() for _ in range(min(concurrency, len(self._sessions)))))
        return self._found()

    def _found(self) -> tuple[list[Request], float]:
        return [each for each in self._requests if each is not None], self._now()

    async def _converse(
        self, numbers: Sequence[int], at_s: float, *, is_timed: bool = False
    ) -> None:
        """The turns of a session, of which the first is due at `at_s`."""
        for number in numbers:
            ask = self._asks[number]
            if is_timed and ask.at_s is not None:
                at_s = ask.at_s  # also where the turn before is late: that is the server's
            else:
                at_s += ask.think_s
            await asyncio.sleep(max(0.0, at_s - self._now()))
            self._requests[number] = await self._ask(ask, at_s)
            at_s = self._now()
            self._num_done += 1
            self._advance(self._num_done)

    def _now(self) -> float:
        return time.perf_counter() - self._started

    async def _ask(self, ask: Ask, intended_s: float) -> Request:
        import aiohttp
        from aiohttp.http_exceptions import HttpProcessingError

        sent_s = self._now()
        known: dict[str, Any] = {
            "session": ask.session,
            "prompt_tokens": len(ask.tokens),
            "intended_s": intended_s,
            "sent_s": sent_s,
        }
        body = {**self._body, "prompt": list(ask.tokens), "max_tokens": ask.max_tokens}
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    text = (await response.text())[:_MAX_ERROR]
                    raise _Wrong(f"HTTP {response.status}: {text}")
                return Request(**known, **await self._read(response, ask, intended_s))
        except (
            *(_Wrong, aiohttp.ClientError, HttpProcessingError),
            *(TimeoutError, OSError, ValueError),
        ) as error:
            return Request(**known, output_tokens=0, error=str(error) or type(error).__name__)
        except (AttributeError, TypeError, KeyError) as error:
            told = f"an event is not what such a server sends: {error}"
            return Request(**known, output_tokens=0, error=told)

    async def _read(
        self, response: aiohttp.ClientResponse, ask: Ask, intended_s: float
    ) -> dict[str, Any]:
        """What a stream tells. Raises _Wrong."""
        if "text/event-stream" not in response.headers.get("Content-Type", ""):
            raise _Wrong("the server does not stream its answers")
        ttft_s: float | None = None
        latency_s: float | None = None
        gaps: list[float] = []
        usage: dict[str, Any] | None = None
        digest = blake2b(digest_size=16)
        is_done = False
        async for event in _events(response):
            is_done = event == _DONE
            if is_done:
                continue
            chunk = _parsed(event)
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or ():
                text, ids = choice.get("text"), choice.get("token_ids")
                if text or ids:
                    came_s = self._now() - intended_s
                    if latency_s is not None:
                        gaps.append(round(came_s - latency_s, _GAP_DIGITS))
                    ttft_s, latency_s = came_s if ttft_s is None else ttft_s, came_s
                    # However the server cuts its answer, its digest is the same.
                    digest.update(b"".join(b"%d " % each for each in ids) if ids else text.encode())
        if not is_done:
            raise _Wrong("the answer was cut short")
        await _drain(response)
        if ttft_s is None:
            raise _Wrong("no token came")
        if usage is None:
            raise _Wrong("the server does not tell its usage (stream_options.include_usage)")
        details = usage.get("prompt_tokens_details") or {}
        if usage.get("prompt_tokens") != len(ask.tokens):
            raise _Wrong(f"{len(ask.tokens)} tokens were asked, not {usage.get('prompt_tokens')}")
        output, cached = usage.get("completion_tokens"), details.get("cached_tokens")
        is_told = _is_count(output, 1, ask.max_tokens)
        if not is_told or (cached is not None and not _is_count(cached, 0, len(ask.tokens))):
            raise _Wrong(f"the server's usage makes no sense: {str(usage)[:_MAX_ERROR]}")
        return {
            "output_tokens": output,
            "ttft_s": ttft_s,
            "latency_s": latency_s,
            "cached_tokens": cached,
            "output": digest.hexdigest(),
            "itl_s": tuple(gaps),
        }


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read to the end of the body, so that its connection is used again; but not for ever."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            async for _ in response.content.iter_any():
                pass


def _is_count(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of server-sent events, one a line as all these servers send them; _DONE is last."""
    async for line in response.content:
        if line.startswith(b"data:"):
            event = line[5:].strip().decode("utf-8", "replace")
            yield event
            if event == _DONE:
                return


def _parsed(event: str) -> dict[str, Any]:
    try:
        chunk = json.loads(event)
    except (json.JSONDecodeError, RecursionError):
        raise _Wrong(f"an event is no JSON: {event[:50]!r}") from None
    if not isinstance(chunk, dict):
        raise _Wrong(f"an event is no object: {event[:50]!r}")
    if chunk.get("error"):
        raise _Wrong(f"the server says: {str(chunk['error'])[:_MAX_ERROR]}")
    return chunk
