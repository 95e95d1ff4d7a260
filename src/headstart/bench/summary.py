"""What one run comes to: quantiles with intervals, rates, hits, errors, goodput."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from headstart.bench.intervals import Estimate, Floats, Ints, estimate, num_needed
from headstart.bench.ratios import good_share
from headstart.bench.run import Run
from headstart.bench.slo import Slo

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
TIMES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "latency": "latency",
}
"""To the first token; for each later one, on average of a request; between two; to the last."""
_MAX_KINDS = 8
_MAX_KIND = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """One kind of time, in seconds."""

    num: int
    """Of how many."""
    quantiles: Mapping[str, Estimate | None]
    """By `SHARES`. None: too few for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run. Rates count what was answered, a second from its start to its last answer."""

    num_requests: int
    num_failed: int
    num_sessions: int
    duration_s: float
    errors: Mapping[str, int]
    """By kind, the most frequent first."""
    times: Mapping[str, Times]
    """By `TIMES`."""
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    hit_rate: float | None
    possible_hit_rate: float | None
    send_lag_s: float | None
    is_sent_late: bool
    slo: Slo
    slo_share: float | None
    """Of the requests sent; None: there is no SLO."""
    goodput_per_s: float | None
    """Requests that met it."""


def summarise(run: Run, slo: Slo | None = None) -> Summary:
    """Of any run, also one in which all failed."""
    slo, good = slo or Slo(), run.good
    share = good_share(run, slo.is_met) if slo.limits and run.requests else None
    return Summary(
        num_requests=len(run.requests),
        num_failed=len(run.requests) - len(good),
        num_sessions=len({request.session for request in run.requests}),
        duration_s=run.duration_s,
        errors=error_kinds(run),
        times={name: _times(*samples) for name, samples in _samples(run)},
        requests_per_s=len(good) / run.duration_s,
        input_tokens_per_s=sum(request.prompt_tokens for request in good) / run.duration_s,
        output_tokens_per_s=run.output_tokens_per_s,
        hit_rate=run.hit_rate if good else None,
        possible_hit_rate=run.simulated_hit_rate,
        send_lag_s=run.send_lag_s,
        is_sent_late=run.is_sent_late,
        slo=slo,
        slo_share=share,
        goodput_per_s=None if share is None else share * len(run.requests) / run.duration_s,
    )


def error_kinds(run: Run) -> dict[str, int]:
    """How many requests failed with what; what differs only in numbers is one kind."""
    kinds: Counter[str] = Counter()
    for request in run.requests:
        if not request.is_good:
            error = request.error or "no first token"
            # A status is a number that counts; a port, an address or an id is not.
            status = re.match(r"HTTP \d{3}\b", error)
            kinds[status[0] if status else shown(re.sub(r"\d+", "#", error), _MAX_KIND)] += 1
    frequent = dict(kinds.most_common(_MAX_KINDS))
    if others := kinds.total() - sum(frequent.values()):
        frequent["others"] = others
    return frequent


def figures(summary: Summary) -> Iterator[tuple[str, str]]:
    """Title and value of each figure, as text for people. Times in ms."""
    yield "requests", f"{summary.num_requests}, of {summary.num_sessions} sessions"
    yield "failed", str(summary.num_failed)
    for kind, count in summary.errors.items():
        yield f"  {kind}", str(count)
    for name, title in TIMES.items():
        times = summary.times[name]
        for quantile, found in times.quantiles.items() if times.num else ():
            yield f"{title} {quantile}, ms", told(found, SHARES[quantile], times.num)
    yield "input, tokens/s", f"{summary.input_tokens_per_s:.1f}"
    yield "output, tokens/s", f"{summary.output_tokens_per_s:.1f}"
    yield "requests/s", f"{summary.requests_per_s:.3g}"
    yield "hits, of the tokens", told_share(summary.hit_rate)
    yield "hits that are possible", told_share(summary.possible_hit_rate)
    if summary.slo_share is not None:
        yield f"meet {summary.slo}", told_share(summary.slo_share)
        yield "goodput, requests/s", f"{summary.goodput_per_s:.3g}"
    lag_s = summary.send_lag_s
    late = ": too late, its times are partly the client's" if summary.is_sent_late else ""
    yield "sent late, p99, ms", "not told" if lag_s is None else f"{lag_s * 1000:.1f}{late}"


def shown(text: str, most: int) -> str:
    """Text from a file for terminal and page: one line that can be printed, not too long."""
    line = "".join(each if each.isprintable() else " " for each in text)
    line = " ".join(line.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def told(found: Estimate | None, share: float, num: int) -> str:
    """A quantile in ms with its interval, or why there is none."""
    if found is None:
        return f"too few: {num} of {num_needed(share)}"
    value = f"{found.value * 1000:.1f}"
    if found.low is None or found.high is None:
        return value
    return f"{value} ({found.low * 1000:.1f} to {found.high * 1000:.1f})"


def told_share(share: float | None) -> str:
    """A share in %."""
    return "not told" if share is None else f"{share:.1%}"


def document(summary: Summary) -> dict[str, object]:
    """For JSON; times in seconds."""

    def estimated(found: Estimate | None) -> dict[str, float | None] | None:
        if found is None:
            return None
        return {"value": found.value, "low95": found.low, "high95": found.high}

    return {
        "requests": summary.num_requests,
        "failed": summary.num_failed,
        "sessions": summary.num_sessions,
        "duration_s": summary.duration_s,
        "errors": dict(summary.errors),
        **{
            f"{name}_s": {"count": times.num}
            | {key: estimated(found) for key, found in times.quantiles.items()}
            for name, times in summary.times.items()
        },
        "requests_per_s": summary.requests_per_s,
        "input_tokens_per_s": summary.input_tokens_per_s,
        "output_tokens_per_s": summary.output_tokens_per_s,
        "hit_rate": summary.hit_rate,
        "possible_hit_rate": summary.possible_hit_rate,
        "send_lag_s": summary.send_lag_s,
        "is_sent_late": summary.is_sent_late,
        "slo": slo_document(summary),
    }


def slo_document(summary: Summary) -> dict[str, object] | None:
    """The SLO and how it was met, for JSON; None: there is none."""
    if summary.slo_share is None:
        return None
    return {
        "limits_s": dict(summary.slo.limits),
        "presets": list(summary.slo.presets),
        "note": summary.slo.note,
        "share": summary.slo_share,
        "goodput_per_s": summary.goodput_per_s,
    }


def _samples(run: Run) -> Iterator[tuple[str, tuple[Floats, Ints]]]:
    """The times of each kind, and the sessions they are of."""
    good = run.good
    numbers: dict[str, int] = {}
    sessions = np.array(
        [numbers.setdefault(request.session, len(numbers)) for request in good], dtype=np.intp
    )
    for name, values in (
        ("ttft", [request.ttft_s for request in good]),
        ("tpot", [request.tpot_s for request in good]),
    ):
        yield name, _known(values, sessions)
    gaps = [request.itl_s or () for request in good]
    yield (
        "itl",
        (
            np.fromiter((gap for each in gaps for gap in each), dtype=np.float64),
            np.repeat(sessions, [len(each) for each in gaps]),
        ),
    )
    yield "latency", _known([request.latency_s for request in good], sessions)


def _known(values: list[float | None], sessions: Ints) -> tuple[Floats, Ints]:
    times = np.array(values, dtype=np.float64)  # None becomes nan
    is_known = ~np.isnan(times)
    return times[is_known], sessions[is_known]


def _times(samples: Floats, sessions: Ints) -> Times:
    return Times(
        num=len(samples),
        quantiles={name: estimate(samples, sessions, share) for name, share in SHARES.items()},
    )
