"""When first tokens come: a trace's requests, at its times, against engines with tiers. Pure.

    arrival --- read what is planned ---> ready --- wait for the engine, compute ---> first token

A request goes to the engine that has the least to compute. Of what tiers hold of its prompt,
`headstart.planner` chooses how much is loaded, as it does in a node: by the queue of the device and
by half of what the engine has to compute for others. A device reads what it is asked for in order,
all engines' requests in one queue, at `latency + bytes / bandwidth`. An engine computes one prompt
at a time, the one that was ready first; copying its blocks from memory is a part of that. In a
closed loop so many requests are open at once, and the next comes with the last token of one.

What is planned is waited for. Decoding takes no time of the engine, and writing none of the device.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headstart.bench.run import Request
from headstart.bench.slo import Slo
from headstart.bench.statistics import quantile
from headstart.costs import EngineCosts, ReadCosts
from headstart.errors import ConfigError
from headstart.planner import Held, Prompt, plan
from headstart.tuner.recorded import Floats, Ints

_BUSY_SHARE = 0.5
"""Of what is to be computed for others, as the vLLM connector counts it: they may have hits."""
_EVERY = 500
_FINISHED, _READY, _ANSWERED = 0, 1, 2
ENGINE, COMPUTED = "engine", "computed"
"""Where tokens come from besides tiers: the engine's own prefix cache, and nowhere."""


class Loads(enum.StrEnum):
    """How much of what is held is loaded: the values of the connector's `load`."""

    PLANNED = "planned"
    """What comes sooner than it is computed."""
    ALWAYS = "always"
    """All of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """A tier, as its readers find it."""

    name: str
    reads: ReadCosts | None = None
    """Of the idle device; None: in memory, nothing is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Engines, and what they load from."""

    costs: EngineCosts
    block_size: int
    block_nbytes: int
    media: tuple[Medium, ...] = ()
    """Fastest first."""
    num_engines: int = 1
    loads: Loads = Loads.PLANNED

    def __post_init__(self) -> None:
        if self.num_engines < 1 or self.block_size < 1 or self.block_nbytes < 1:
            raise ConfigError(
                f"{self.num_engines} engines with blocks of {self.block_size} tokens and "
                f"{self.block_nbytes} bytes: each must be at least 1"
            )
        for medium in self.media:
            reads = medium.reads
            if reads is not None and not (
                0.0 < reads.bytes_per_s < math.inf and 0.0 <= reads.fixed_s < math.inf
            ):
                raise ConfigError(
                    f"tier {medium.name}: {reads.bytes_per_s:g} bytes a second after "
                    f"{reads.fixed_s:g} s; a bandwidth is above 0, a latency at least 0"
                )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loop:
    """A closed loop: requests come in their order, each as soon as one of the places is free."""

    concurrency: int
    answer_s: Floats
    """From the first token of each to its last, when its place is free again."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"{self.concurrency} requests at once; at least 1 is")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """Requests in the order of their times, and what is held of them."""

    at_s: Floats
    num_tokens: Ints
    own_blocks: Ints
    """At the start of each prompt, in the engine's own cache."""
    held: tuple[Ints, ...]
    """The same of each medium and the faster ones."""
    loop: Loop | None = None
    """None: open, each comes at its time."""

    def __post_init__(self) -> None:
        if not len(self.at_s) or not np.isfinite(self.at_s).all():
            raise ConfigError("requests without times cannot be replayed")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answered:
    """What came of each request."""

    at_s: Floats
    """When it was asked."""
    ttft_s: Floats
    compute_s: Floats
    """Of its engine."""
    recompute_s: Floats
    """The same, with nothing loaded."""
    sources: dict[str, Ints]
    """Prompt tokens by where they came from: `ENGINE`, each medium, `COMPUTED`."""
    device_s: dict[str, Floats]
    """In which each medium's device read for it, and could not for others."""


def replay(
    asked: Asked, serving: Serving, advance: Callable[[int], None] = lambda num_requests: None
) -> Answered:
    """Serve all requests."""
    return _Replay(asked, serving).run(advance)


class _Engine:
    """What an engine has to do. `ahead_s` is what is known before any plan: whole prompts."""

    def __init__(self) -> None:
        self.queue: list[tuple[float, int]] = []
        """Ready requests, and since when."""
        self.is_busy = False
        self._busy_until = 0.0
        self._num_waiting = 0
        self._waiting_s = 0.0

    def ahead_s(self, now: float) -> float:
        return max(0.0, self._busy_until - now) + self._waiting_s

    def await_(self, recompute_s: float) -> None:
        self._num_waiting += 1
        self._waiting_s += recompute_s

    def begin(self, recompute_s: float, until: float) -> None:
        self._num_waiting -= 1
        # Sums of differences drift: nothing is nothing.
        self._waiting_s = self._waiting_s - recompute_s if self._num_waiting else 0.0
        self._busy_until, self.is_busy = until, True


class _Replay:
    """See the module."""

    def __init__(self, asked: Asked, serving: Serving) -> None:
        self._serving = serving
        self._at_s: list[float] = asked.at_s.tolist()
        self._loop, self._now, self._num_open = asked.loop, 0.0, 0
        self._num_tokens: list[int] = np.maximum(asked.num_tokens, 1).tolist()
        reached = np.maximum.accumulate([asked.own_blocks, *asked.held], axis=0)
        self._own: list[int] = reached[0].tolist()
        self._held: list[tuple[int, ...]] = list(zip(*reached[1:].tolist(), strict=True))
        if not asked.held:
            self._held = [()] * len(self._at_s)
        num = len(self._at_s)
        self._ttft_s, self._compute_s, self._recompute_s = np.zeros((3, num))
        self._loaded = np.zeros((len(serving.media), num), np.int64)
        self._device_s = np.zeros((len(serving.media), num))
        self._free_at = [0.0] * len(serving.media)
        self._engines = [_Engine() for _ in range(serving.num_engines)]
        self._events: list[tuple[float, int, int, int]] = []
        """Time, what it is, request, engine."""

    def run(self, advance: Callable[[int], None]) -> Answered:
        for number in range(len(self._at_s)):
            if number % _EVERY == 0:
                advance(number)
            if self._loop is not None:
                self._at_s[number] = self._place_at(self._loop.concurrency)
            at_s = self._at_s[number]
            while self._events and self._events[0][0] <= at_s:
                self._next_event()
            self._arrive(number, at_s)
        while self._events:
            self._next_event()
        return self._answered()

    def _place_at(self, concurrency: int) -> float:
        while self._num_open == concurrency:
            self._next_event()
        self._num_open += 1
        return self._now

    def _arrive(self, number: int, now: float) -> None:
        serving, own = self._serving, self._own[number]
        which = min(range(len(self._engines)), key=lambda each: self._engines[each].ahead_s(now))
        engine = self._engines[which]
        num_tokens = self._num_tokens[number]
        prompt = Prompt(
            num_tokens=num_tokens,
            block_size=serving.block_size,
            block_nbytes=serving.block_nbytes,
            num_local=min(own * serving.block_size, num_tokens - 1),
        )
        count = self._chosen(number, prompt, engine.ahead_s(now), now)
        ready_at = now + self._read_s(number, prompt, count, now)
        recompute_s = prompt.recompute_s(serving.costs)
        self._recompute_s[number] = recompute_s
        self._compute_s[number] = prompt.prefill_s(serving.costs, count)
        engine.await_(recompute_s)
        heapq.heappush(self._events, (ready_at, _READY, number, which))

    def _chosen(self, number: int, prompt: Prompt, ahead_s: float, now: float) -> int:
        """Blocks at the start of the prompt that need not be computed."""
        own, held = self._own[number], self._held[number]
        most = held[-1] if held else own
        if most <= own or self._serving.loads is Loads.ALWAYS:
            return most
        parts = [Held(tier=ENGINE, num_blocks=own, costs=None)]
        for index, medium in enumerate(self._serving.media):
            costs = None if medium.reads is None else self._reads(index, medium.reads, now)
            parts.append(Held(tier=medium.name, num_blocks=held[index], costs=costs))
        made = plan(prompt, parts, self._serving.costs, busy_s=_BUSY_SHARE * ahead_s)
        return max(own, made.num_blocks)

    def _reads(self, index: int, idle: ReadCosts, now: float) -> ReadCosts:
        """What a read costs behind those that were accepted before."""
        ahead_s = max(0.0, self._free_at[index] - now)
        return replace(idle, ahead_nbytes=round(ahead_s * idle.bytes_per_s)) if ahead_s else idle

    def _read_s(self, number: int, prompt: Prompt, count: int, now: float) -> float:
        """Seconds until the chosen blocks are in memory; their reads are accepted."""
        total_s, start = 0.0, self._own[number]
        for index, medium in enumerate(self._serving.media):
            end = min(self._held[number][index], count)
            if end <= start:
                continue
            self._loaded[index, number] = prompt.tokens(end) - prompt.tokens(start)
            if medium.reads is not None:
                nbytes = (end - start) * prompt.block_nbytes
                total_s += self._reads(index, medium.reads, now).read_s(nbytes)
                device_s = nbytes / medium.reads.bytes_per_s
                self._free_at[index] = max(self._free_at[index], now) + device_s
                self._device_s[index, number] = device_s
            start = end
        return total_s

    def _next_event(self) -> None:
        now, what, number, which = heapq.heappop(self._events)
        self._now, engine = now, self._engines[which]
        if what == _READY:
            heapq.heappush(engine.queue, (now, number))
        elif what == _FINISHED:
            engine.is_busy = False
        else:
            self._num_open -= 1
        if engine.is_busy or not engine.queue:
            return
        _, number = heapq.heappop(engine.queue)
        until = now + float(self._compute_s[number])
        engine.begin(float(self._recompute_s[number]), until)
        self._ttft_s[number] = until - self._at_s[number]
        heapq.heappush(self._events, (until, _FINISHED, number, which))
        if self._loop is not None:
            answered = until + float(self._loop.answer_s[number])
            heapq.heappush(self._events, (answered, _ANSWERED, number, which))

    def _answered(self) -> Answered:
        size = self._serving.block_size
        num_tokens = np.array(self._num_tokens)
        own = np.minimum(np.array(self._own) * size, num_tokens - 1)
        names = [medium.name for medium in self._serving.media]
        return Answered(
            at_s=np.array(self._at_s),
            ttft_s=self._ttft_s,
            compute_s=self._compute_s,
            recompute_s=self._recompute_s,
            sources={
                ENGINE: own,
                **dict(zip(names, self._loaded, strict=True)),
                COMPUTED: num_tokens - own - self._loaded.sum(axis=0),
            },
            device_s=dict(zip(names, self._device_s, strict=True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A service level, and the time of a later token, which is not simulated."""

    slo: Slo = field(default_factory=Slo)
    tpot_s: float = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Sums over some requests."""

    p50_s: float
    p90_s: float
    p99_s: float
    mean_s: float
    window_s: float
    """From the first of them to the last first token."""
    slo_share: float | None
    """Of the requests, that meet the service level; None: there is none."""
    goodput_per_s: float | None
    """Such requests a second."""
    most_per_s: float
    """Requests a second at which the busiest of engines and devices would never rest."""
    bound_by: str
    """Which that is."""
    offered: float
    """Work of the engines over their time while requests come: above 1 the queue only grows."""
    compute_s: float
    saved_s: float
    """Of the engines, against computing all that they do not have themselves."""
    shares: dict[str, float]
    """Of the prompt tokens, by where they came from."""

    @property
    def saved_share(self) -> float:
        """Of the seconds that engines would have computed."""
        return self.saved_s / (self.saved_s + self.compute_s)


def summarise(
    asked: Asked,
    answered: Answered,
    serving: Serving,
    *,
    first: int = 0,
    output_tokens: Sequence[int] = (),
    level: Level | None = None,
) -> Latency:
    """Of the requests from `first` on; `output_tokens` of all of them, for a service level."""
    at_s, ttft_s = answered.at_s[first:], answered.ttft_s[first:]
    window_s = float((at_s + ttft_s).max() - at_s[0])
    compute_s = float(answered.compute_s[first:].sum())
    busy = {"engines": compute_s / serving.num_engines}
    busy |= {name: float(each[first:].sum()) for name, each in answered.device_s.items()}
    bound_by = max(busy, key=lambda name: busy[name])
    span_s = float(at_s[-1] - at_s[0])
    asked_tokens = int(np.maximum(asked.num_tokens[first:], 1).sum())
    times = ttft_s.tolist()
    num_good = None
    if level is not None and level.slo.limits:
        num_good = _num_good(times, asked.num_tokens[first:], output_tokens[first:], level)
    return Latency(
        p50_s=quantile(times, 0.5),
        p90_s=quantile(times, 0.9),
        p99_s=quantile(times, 0.99),
        mean_s=float(ttft_s.mean()),
        window_s=window_s,
        slo_share=None if num_good is None else num_good / len(times),
        goodput_per_s=None if num_good is None else num_good / window_s,
        most_per_s=len(times) / busy[bound_by],
        bound_by=bound_by,
        offered=busy["engines"] / span_s if span_s else 0.0,
        compute_s=compute_s,
        saved_s=float((answered.recompute_s - answered.compute_s)[first:].sum()),
        shares={
            name: float(each[first:].sum()) / asked_tokens
            for name, each in answered.sources.items()
        },
    )


def _num_good(
    times: Sequence[float], num_tokens: Ints, output_tokens: Sequence[int], level: Level
) -> int:
    found = 0
    for ttft_s, prompt, output in zip(times, num_tokens, output_tokens, strict=True):
        later = max(0, int(output) - 1)
        request = Request(
            session="",
            prompt_tokens=int(prompt),
            output_tokens=max(1, int(output)),
            ttft_s=ttft_s,
            # A rounding error is no miss where the limit is just that time.
            latency_s=ttft_s + later * level.tpot_s * (1.0 - 1e-9),
        )
        found += level.slo.is_met(request)
    return found
