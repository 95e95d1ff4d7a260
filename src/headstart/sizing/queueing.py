"""TTFT and TPOT of clients that share a device, by a simulation. Pure, and the same every time.

Each client of each engine sends a request, waits for its answer, and sends the next. All begin at
once: the first wave is the cold start after a restart.

    storage  reads the hits; those under way share its bandwidth equally
    engine   works in steps. A step copies the hits that have come, computes what is left of waiting
             prompts in order of arrival, up to `max_step_tokens`, and gives each running answer one
             token. It lasts

                 (step_s + copies / link + work of the tokens, if prompts wait)
                 + (tpot, if answers run)

So prompts that share a step have their first tokens together, at its end, and an answer is delayed
by all that steps copy and compute for others.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headstart.costs import EngineCosts, num_pairs
from headstart.errors import ConfigError

_WAVES = 30
_MAX_REQUESTS = 6000
_MAX_CLIENTS = 2000
_MAX_STEPS = 300_000
_MIN_S = 1e-12
_ROUNDING = 1e-9
_SPREAD = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one kind of request asks for."""

    share: float = 1.0
    """Of the requests."""
    tokens: int
    """Of the prompt."""
    held_tokens: int = 0
    """Fewer than `tokens`; the rest is computed."""
    fixed_s: float = 0.0
    """Before its first byte."""
    read_nbytes: int = 0
    """From the storage."""
    copy_nbytes: int = 0
    """To the GPUs."""
    output_tokens: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one request; seconds from the start of the simulation."""

    asked_s: float
    first_s: float
    answered_s: float
    output_tokens: int

    @property
    def ttft_s(self) -> float:
        """To the first token."""
        return self.first_s - self.asked_s

    @property
    def tpot_s(self) -> float:
        """Of each further token, on average; none take none."""
        return (self.answered_s - self.first_s) / max(1, self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What came of all."""

    p50_s: float
    p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    burst_p50_s: float
    """Of the first wave, all at once."""
    burst_worst_s: float
    requests_per_s: float
    """Of all engines, after the first wave."""


def simulate(
    works: Sequence[Work],
    *,
    costs: EngineCosts,
    tpot_s: float,
    clients: int,
    engines: int = 1,
    bytes_per_s: float,
    seed: int = 0,
) -> Times:
    """Times of `clients` an engine that ask for these works at random. Raises ConfigError.

    Answers are half to one and a half times as long as the works say: were all as long, clients
    would go on in step for ever.
    """
    total = clients * engines
    if not 0 < total <= _MAX_CLIENTS:
        raise ConfigError(
            f"{clients} clients x {engines} engines: between 1 and {_MAX_CLIENTS} can be simulated"
        )
    num = max(3 * total, min(_MAX_REQUESTS, _WAVES * total))
    requests = _drawn(works, num, seed)
    most = costs.max_step_tokens
    num_steps = sum(-(-(each.tokens - each.held_tokens) // most) for each in requests)
    if num_steps > _MAX_STEPS:
        raise ConfigError(
            f"{num_steps} steps of {most} tokens: at most {_MAX_STEPS} can be simulated; give "
            "larger steps (--step-tokens), shorter prompts or fewer clients"
        )
    found = follow(
        requests,
        costs=costs,
        tpot_s=tpot_s,
        clients=clients,
        engines=engines,
        bytes_per_s=bytes_per_s,
    )
    wave, later = found[:total], found[total:]
    # The last answers run alone, when nobody asks any more.
    busy = later[:-total]
    span = max(each.first_s for each in later) - min(each.asked_s for each in later)
    ttft, burst = [each.ttft_s for each in later], [each.ttft_s for each in wave]
    tpot = [each.tpot_s for each in busy]
    return Times(
        p50_s=float(np.quantile(ttft, 0.5)),
        p99_s=float(np.quantile(ttft, 0.99)),
        tpot_p50_s=float(np.quantile(tpot, 0.5)),
        tpot_p99_s=float(np.quantile(tpot, 0.99)),
        burst_p50_s=float(np.quantile(burst, 0.5)),
        burst_worst_s=max(burst),
        requests_per_s=len(later) / span if span > 0 else 0.0,
    )


def _drawn(works: Sequence[Work], num: int, seed: int) -> list[Work]:
    """So many requests for these works, at random."""
    rng = np.random.default_rng(seed)
    shares = np.array([work.share for work in works])
    kinds = rng.choice(len(works), size=num, p=shares / shares.sum())
    lengths = rng.uniform(1.0 - _SPREAD, 1.0 + _SPREAD, size=num)
    return [
        replace(works[kind], output_tokens=max(1, round(works[kind].output_tokens * length)))
        for kind, length in zip(kinds.tolist(), lengths.tolist(), strict=True)
    ]


def follow(
    requests: Sequence[Work],
    *,
    costs: EngineCosts,
    tpot_s: float,
    clients: int,
    engines: int = 1,
    bytes_per_s: float,
) -> list[Outcome]:
    """What comes of these requests, in the order in which clients ask them."""
    run = _Run(requests, costs, max(tpot_s, _MIN_S), engines, bytes_per_s)
    return run.outcomes(clients)


class _Shared:
    """What several wait for at the same pace, which changes."""

    def __init__(self) -> None:
        self.version = 0
        self.pace = 0.0
        """Each of them gets so much a second."""
        self._got = self._at = 0.0
        self._due: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._due)

    def advance(self, now: float) -> None:
        self._got += (now - self._at) * self.pace
        self._at = now

    def add(self, amount: float, request: int) -> None:
        heapq.heappush(self._due, (self._got + amount, request))

    def reach(self, now: float) -> None:
        """As `advance`, to what `next_at` was: the first has got all, whatever is rounded."""
        self.advance(now)
        self._got = max(self._got, self._due[0][0])

    def ended(self) -> list[int]:
        """Those that have got all they wait for, taken out; rounding is forgiven."""
        found = []
        while self._due and self._due[0][0] - self._got <= _ROUNDING * max(1.0, self._due[0][0]):
            found.append(heapq.heappop(self._due)[1])
        return found

    @property
    def next_at(self) -> float:
        if not self._due or not self.pace:
            return math.inf
        return self._at + max(0.0, self._due[0][0] - self._got) / self.pace


class _Run:
    """One simulation."""

    def __init__(
        self,
        requests: Sequence[Work],
        costs: EngineCosts,
        tpot_s: float,
        engines: int,
        bytes_per_s: float,
    ) -> None:
        self._requests, self._costs, self._tpot_s = requests, costs, tpot_s
        self._bytes_per_s = bytes_per_s
        self._now = 0.0
        self._num_asked = self._num_events = 0
        self._events: list[tuple[float, int, str, int, int]] = []
        self._storage = _Shared()
        self._answers = [_Shared() for _ in range(engines)]
        self._waiting: list[deque[tuple[int, int]]] = [deque() for _ in range(engines)]
        """Requests, and where the next step goes on with each."""
        self._step: list[list[int] | None] = [None] * engines
        """Requests whose first tokens the step under way gives; None: no prompt is in it."""
        self._engine = [0] * len(requests)
        self._asked, self._first, self._answered = ([0.0] * len(requests) for _ in range(3))

    def outcomes(self, clients: int) -> list[Outcome]:
        """Until all requests are answered."""
        for _ in range(clients):
            for engine in range(len(self._answers)):
                self._ask(engine)
        while self._events:
            self._now, _, what, which, version = heapq.heappop(self._events)
            match what:
                case "sent":
                    self._read(which)
                case "read" if version == self._storage.version:
                    self._storage.reach(self._now)
                    self._end_reads()
                case "step":
                    self._end_step(which)
                case "answered" if version == self._answers[which].version:
                    self._answers[which].reach(self._now)
                    self._end_answers(which)
                    self._watch("answered", which, self._answers[which])
        return [
            Outcome(
                asked_s=self._asked[i],
                first_s=self._first[i],
                answered_s=self._answered[i],
                output_tokens=work.output_tokens,
            )
            for i, work in enumerate(self._requests)
        ]

    def _ask(self, engine: int) -> None:
        if self._num_asked < len(self._requests):
            request = self._num_asked
            self._num_asked += 1
            self._engine[request], self._asked[request] = engine, self._now
            self._push(self._now + self._requests[request].fixed_s, "sent", request)

    def _read(self, request: int) -> None:
        nbytes = self._requests[request].read_nbytes
        if not nbytes:
            self._arrive(request)
            return
        self._storage.advance(self._now)
        self._storage.add(nbytes, request)
        self._share_storage()

    def _end_reads(self) -> None:
        for request in self._storage.ended():
            self._arrive(request)
        self._share_storage()

    def _share_storage(self) -> None:
        self._storage.pace = self._bytes_per_s / max(1, len(self._storage))
        self._watch("read", 0, self._storage)

    def _arrive(self, request: int) -> None:
        engine = self._engine[request]
        self._waiting[engine].append((request, self._requests[request].held_tokens))
        if self._step[engine] is None:
            # Those that come at the same time share the step.
            self._step[engine] = []
            self._push(self._now, "step", engine)

    def _end_step(self, engine: int) -> None:
        """Give the tokens of a step, and begin the next."""
        answers = self._answers[engine]
        self._end_answers(engine)
        for request in self._step[engine] or ():
            self._first[request] = self._now
            answers.add(self._requests[request].output_tokens - 1, request)
        self._end_answers(engine)
        if self._waiting[engine]:
            seconds = self._take(engine)
            answers.pace = 1.0 / seconds
            self._push(self._now + seconds, "step", engine)
        else:
            self._step[engine] = None
            answers.pace = 1.0 / self._tpot_s
        self._watch("answered", engine, answers)

    def _take(self, engine: int) -> float:
        """Choose what the next step does; the seconds that it lasts."""
        costs, waiting = self._costs, self._waiting[engine]
        num_answers = len(self._answers[engine])
        room = max(1, costs.max_step_tokens - num_answers)
        seconds = costs.step_s + (self._tpot_s if num_answers else 0.0)
        done = []
        while waiting and room:
            request, begin = waiting.popleft()
            work = self._requests[request]
            if begin == work.held_tokens:
                seconds += costs.copy_s(work.copy_nbytes)
            tokens = min(room, work.tokens - begin)
            seconds += costs.work_s(tokens, num_pairs(begin, tokens))
            room -= tokens
            if begin + tokens < work.tokens:
                waiting.appendleft((request, begin + tokens))
            else:
                done.append(request)
        self._step[engine] = done
        return max(seconds, _MIN_S)

    def _end_answers(self, engine: int) -> None:
        """Their clients ask again."""
        answers = self._answers[engine]
        answers.advance(self._now)
        for request in answers.ended():
            self._answered[request] = self._now
            self._ask(engine)

    def _watch(self, what: str, which: int, shared: _Shared) -> None:
        """Come back when the next of those who wait for it is done, at the present pace."""
        shared.version += 1
        if math.isfinite(shared.next_at):
            self._push(shared.next_at, what, which, shared.version)

    def _push(self, at: float, what: str, which: int, version: int = 0) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at, self._num_events, what, which, version))
