"""What a request has to meet: `ttft=2s,tpot=100ms,latency=30s`, a preset, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headstart.bench.run import Request
from headstart.errors import ConfigError
from headstart.units import format_seconds, parse_seconds

LIMITS = ("ttft", "tpot", "latency")

# Time to the first token and for each later one, in s: MLPerf Inference's rules of 2026-07-23
# (inference_rules.adoc, "Benchmarks"), which ask for them at p99. "Server" is there also called
# "conversational". For gpt-oss-120b, interactive, LoadGen's mlperf.conf has had 15 ms a token.
_MLPERF = {
    "llama2-70b-server": (2.0, 0.2),
    "llama2-70b-interactive": (0.45, 0.04),
    "llama3.1-8b-server": (2.0, 0.1),
    "llama3.1-8b-interactive": (0.5, 0.03),
    "llama3.1-405b-server": (6.0, 0.175),
    "llama3.1-405b-interactive": (4.5, 0.08),
    "mixtral-8x7b-server": (2.0, 0.2),
    "deepseek-r1-server": (2.0, 0.08),
    "deepseek-r1-interactive": (1.5, 0.015),
    "gpt-oss-120b-server": (3.0, 0.08),
    "gpt-oss-120b-interactive": (2.0, 0.02),
}
PRESETS: dict[str, dict[str, float]] = {
    f"mlperf-{name}": {"ttft": ttft_s, "tpot": tpot_s} for name, (ttft_s, tpot_s) in _MLPERF.items()
}
MLPERF_STYLE = (
    "MLPerf-style, not MLPerf: only its limits are taken. MLPerf Inference forbids that the KV of "
    "one query is used for another, and asks for its own data, arrivals and 99 % of the queries."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """A service level."""

    limits: Mapping[str, float] = field(default_factory=dict)
    """Seconds by `ttft`, `tpot`, `latency`; a request meets all of them. Empty: there is none."""
    presets: tuple[str, ...] = ()
    """Whose limits are among them."""

    def is_met(self, request: Request) -> bool:
        """Whether a request was answered, and in time."""
        if not request.is_good:
            return False
        times = {"ttft": request.ttft_s, "tpot": request.tpot_s, "latency": request.latency_s}
        if request.output_tokens < 2:
            times["tpot"] = 0.0  # there are no later tokens
        return all(
            (time := times[name]) is not None and time <= limit
            for name, limit in self.limits.items()
        )

    @property
    def note(self) -> str:
        """What has to be said wherever it is named; empty: nothing."""
        return MLPERF_STYLE if self.presets else ""

    def __str__(self) -> str:
        limits = ", ".join(f"{name} <= {format_seconds(s)}" for name, s in self.limits.items())
        return f"{limits} ({', '.join(self.presets)})" if self.presets else limits


def parse_slo(text: str | None) -> Slo:
    """The service level of `--slo`; empty or None: none. Raises ConfigError."""
    limits: dict[str, float] = {}
    presets = []
    for part in text.split(",") if text else ():
        name, _, value = part.partition("=")
        if part.startswith("mlperf-"):
            if part not in PRESETS:
                raise ConfigError(f"--slo {part!r} is unknown; presets: {', '.join(PRESETS)}")
            presets.append(part)
            found = PRESETS[part]
        elif name in LIMITS and value:
            found = {name: parse_seconds(value)}
        else:
            raise ConfigError(
                f"--slo {part!r} is unknown; write one of {', '.join(LIMITS)}, such as ttft=2s, or "
                "a preset such as mlperf-llama3.1-8b-server"
            )
        if twice := sorted(limits.keys() & found):
            raise ConfigError(f"--slo: {twice[0]} has two limits; name each once")
        limits |= found
    return Slo(limits=limits, presets=tuple(presets))
