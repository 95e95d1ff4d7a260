"""One run of a load against one server: what was asked, what came, and when.

The project's own format is JSON with the schema `headstart.bench.serve/1`; what other tools write
is read by `headstart.bench.imports`. A field that a tool does not tell is None: what needs it is
then not checked, and said so.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from headstart.bench.statistics import quantile
from headstart.errors import ConfigError

SCHEMA = "headstart.bench.serve/1"
_MAX_SEND_LAG_SHARE = 0.05
_MIN_S, _MAX_S = 1e-9, 1e9
"""Beyond, a time is no measurement, and ratios of such have no logarithm."""
_MAX_TOKENS = 10**12
_MAX_NBYTES = 2**63
_MAX_OVER_DURATION = 1.05


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request. Seconds since the start of the run."""

    session: str
    """Requests of one session are not independent of each other."""
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None = None
    """From its intended time to the first token that is not empty; None: there was none."""
    latency_s: float | None = None
    """From its intended time to the last token."""
    intended_s: float | None = None
    sent_s: float | None = None
    cached_tokens: int | None = None
    """Of its prompt, by the server."""
    output: str | None = None
    """What was answered, or a digest of it."""
    error: str | None = None
    itl_s: tuple[float, ...] | None = None
    """From each piece of its answer to the next; a server may send several tokens in one."""

    @property
    def is_good(self) -> bool:
        """Whether it was answered."""
        return self.error is None and self.ttft_s is not None

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first."""
        if not self.is_good or self.latency_s is None or self.output_tokens < 2:
            return None
        assert self.ttft_s is not None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)


class Rebuild(msgspec.Struct, frozen=True, kw_only=True):
    """How long after a restart a server is as good as before; see `headstart.bench.rebuild`."""

    window: int
    """Requests over which is averaged."""
    hit_rate_s: float | None = None
    """Until the hit rate is 90 % of the steady one; None: never, or hits are not told."""
    ttft_s: float | None = None
    """Until the median TTFT is within 10 % of the steady one; None: never."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    tool: str
    """What made it: only runs of one tool are comparable."""
    duration_s: float
    requests: tuple[Request, ...]
    schema: str = SCHEMA
    arm: str = ""
    workload: str = ""
    salt: str = ""
    has_prefix_cache: bool | None = None
    """Whether the engine's own prefix cache was on."""
    pace: dict[str, float | None] | None = None
    """How it was sent: `rate`, `concurrency` or `trace_time`, and the like."""
    block_size: int = 1
    """Tokens: hits are multiples of it."""
    prompts: str | None = None
    """A digest of what was asked, without salts: runs of a pair have the same."""
    simulated_hit_rate: float | None = None
    """Of prompt tokens, computed from the load as sent."""
    read_nbytes: int | None = None
    """That devices gave during the run, by their counters."""
    loaded_nbytes: int | None = None
    """That the cache says it read from devices, where they were cold."""
    phase: str = ""
    """What was done before; see `headstart.bench.phases`."""
    round: int = 0
    """Runs of one round and one phase are partners."""
    hit_tokens_by_tier: dict[str, int] | None = None
    """Cached tokens by where they came from; `engine` is the engine's own cache."""
    cpu_s: float | None = None
    """That the server's processes and its node's computed during the run."""
    peak_memory_nbytes: int | None = None
    """That they had at once, at most, what they share counted once."""
    rebuild: Rebuild | None = None
    """After a restart, where there was a steady run before."""

    @property
    def good(self) -> list[Request]:
        """Requests that were answered."""
        return [request for request in self.requests if request.is_good]

    @property
    def is_open_loop(self) -> bool:
        """Whether requests were sent however fast the server answers."""
        return bool(self.pace and (self.pace.get("rate") or self.pace.get("trace_time")))

    @property
    def output_tokens_per_s(self) -> float:
        """Throughput."""
        return sum(request.output_tokens for request in self.good) / self.duration_s

    def ttft_s(self, share: float) -> float:
        """The quantile of the time to the first token."""
        return quantile([r.ttft_s for r in self.good if r.ttft_s is not None], share)

    def tpot_s(self, share: float) -> float | None:
        """The quantile of the time for each later token; None: no answer had any."""
        times = [time for r in self.good if (time := r.tpot_s) is not None]
        return quantile(times, share) if times else None

    @property
    def hit_rate(self) -> float | None:
        """Cached share of the prompt tokens."""
        good = self.good
        if any(request.cached_tokens is None for request in good):
            return None
        asked = sum(request.prompt_tokens for request in good)
        return sum(request.cached_tokens or 0 for request in good) / asked if asked else None

    @property
    def send_lag_s(self) -> float | None:
        """99 % of the requests were sent at most so long after they should have been."""
        lags = [
            r.sent_s - r.intended_s
            for r in self.requests
            if r.sent_s is not None and r.intended_s is not None
        ]
        return quantile(lags, 0.99) if lags else None

    @property
    def is_sent_late(self) -> bool:
        """Whether the client was so slow that the times are partly its own."""
        lag_s = self.send_lag_s
        if lag_s is None or not self.good:
            return False
        return lag_s > _MAX_SEND_LAG_SHARE * self.ttft_s(0.5)

    @property
    def is_counted_late(self) -> bool:
        """Whether requests were sent before their times count: clocks differ, or somebody lies."""
        if not self.good:
            return False
        slack_s = _MAX_SEND_LAG_SHARE * self.ttft_s(0.5)
        return any(
            r.intended_s - r.sent_s > slack_s
            for r in self.requests
            if r.sent_s is not None and r.intended_s is not None
        )


def check(run: Run, path: Path) -> Run:
    """The run, if anything can be said of it. Raises ConfigError."""
    if not run.requests:
        raise ConfigError(f"{path}: no request was sent")
    if not run.good:
        first = next((r.error for r in run.requests if r.error), "no first token")
        raise ConfigError(f"{path}: no request was answered; the first error: {first[:200]}")
    if not _MIN_S <= run.duration_s <= _MAX_S:
        raise ConfigError(f"{path}: a duration of {run.duration_s} s")
    if not 1 <= run.block_size <= _MAX_TOKENS or not 0.0 <= (run.simulated_hit_rate or 0.0) <= 1.0:
        raise ConfigError(
            f"{path}: blocks of {run.block_size} tokens, a hit rate of {run.simulated_hit_rate}"
        )
    _check_counters(run, path)
    for request in run.requests:
        for time_s in (request.intended_s, request.sent_s):
            if not abs(time_s or 0.0) <= _MAX_S:
                raise ConfigError(f"{path}: a request at {time_s} s")
    for request in run.good:
        _check_answer(request, run, path)
    return run


def _check_answer(request: Request, run: Run, path: Path) -> None:
    ttft_s = request.ttft_s or 0.0
    latency_s = ttft_s if request.latency_s is None else request.latency_s
    if not _MIN_S <= ttft_s <= latency_s <= _MAX_S:
        raise ConfigError(
            f"{path}: a first token after {ttft_s} s and a last one after {latency_s} s"
        )
    # GuideLLM's runs are cut out of what it sent: requests may begin before them.
    if run.tool != "guidellm" and latency_s > _MAX_OVER_DURATION * run.duration_s:
        raise ConfigError(
            f"{path}: an answer took {latency_s:g} s in a run of {run.duration_s:g} s"
        )
    if any(not 0.0 <= gap_s <= _MAX_S for gap_s in request.itl_s or ()):
        raise ConfigError(f"{path}: a time between two tokens is negative, or none")
    if not all(
        1 <= number <= _MAX_TOKENS for number in (request.output_tokens, request.prompt_tokens)
    ):
        raise ConfigError(
            f"{path}: a prompt of {request.prompt_tokens} tokens and an answer of "
            f"{request.output_tokens}"
        )
    # Others count prompts with a tokenizer of their own, so that more may seem to be cached.
    most = request.prompt_tokens if run.tool == "headstart" else _MAX_TOKENS
    if not 0 <= (request.cached_tokens or 0) <= most:
        raise ConfigError(
            f"{path}: {request.cached_tokens} tokens of a prompt of {request.prompt_tokens} "
            "were cached"
        )


def _check_counters(run: Run, path: Path) -> None:
    rebuild = run.rebuild
    told = {
        "read_nbytes": run.read_nbytes,
        "loaded_nbytes": run.loaded_nbytes,
        "cpu_s": run.cpu_s,
        "peak_memory_nbytes": run.peak_memory_nbytes,
        "rebuild.hit_rate_s": rebuild.hit_rate_s if rebuild else None,
        "rebuild.ttft_s": rebuild.ttft_s if rebuild else None,
        **{f"pace.{name}": value for name, value in (run.pace or {}).items()},
        **{f"hit_tokens_by_tier.{name}": n for name, n in (run.hit_tokens_by_tier or {}).items()},
    }
    for name, value in told.items():
        if not 0.0 <= (value or 0.0) <= _MAX_NBYTES:
            raise ConfigError(f"{path}: {name} is no number from 0 to 2^63")


def pairs_match(one: Run, other: Run) -> str:
    """What differs in what two runs asked, and how; empty: nothing that is known."""
    if one.prompts is not None and other.prompts is not None and one.prompts != other.prompts:
        return "they asked different prompts"
    if one.pace is not None and other.pace is not None and one.pace != other.pace:
        return f"they were sent at different paces: {one.pace} and {other.pace}"
    if one.salt and other.salt and one.salt != other.salt:
        return f"they have different salts ({one.salt!r} and {other.salt!r}), so other prompts"
    if one.round != other.round:
        return f"they are of the rounds {one.round} and {other.round}"
    if len(one.requests) != len(other.requests):
        return f"they sent {len(one.requests)} and {len(other.requests)} requests"
    # A server that fails a request does not tell how it counts its tokens.
    differ = any(
        first.is_good and second.is_good and first.prompt_tokens != second.prompt_tokens
        for first, second in zip(one.requests, other.requests, strict=True)
    )
    return "their prompts have different lengths" if differ else ""
