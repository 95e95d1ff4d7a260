"""Prometheus' text format: snapshots of one server, and what grew between them.

Names are brought to one form: `vllm:prefix_cache_hits`, whether it was exposed as that, with
`_total`, or with another character instead of the colon (`vllm_`, `ray_vllm_`). A counter that
fell was reset, and counts from zero again.

One exposition may be of several engines, ranks and models (data parallel ranks, a router's page,
Prometheus' own federation). Counters are of all engines of the model that is asked most. Ranks that
repeat each other are one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headstart.doctor.facts import Source
from headstart.doctor.readers.base import Document

FAMILIES = ("vllm", "sglang", "lmcache_mp", "lmcache", "headstart")
_FAMILY = "|".join(FAMILIES)
KNOWN = re.compile(rf"^(?:ray_)?(?:{_FAMILY})[:_]\w+(?:\{{|\s+[\d.+-]|\s+NaN)", re.MULTILINE)
_SAMPLE = re.compile(
    rf"(?:ray_)?({_FAMILY})[:_](\w+)(?:\{{(.*)\}})?\s+(\S+)(?:\s+-?\d+)?(?:\s+#.*)?\s*"
)
_START = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)
_OURS = re.compile(rf"(?:ray_)?(?:{_FAMILY})[:_]")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_ENGINES = ("instance", "pod", "worker_addr", "ReplicaId", "WorkerId", "engine", "dp_rank")
"""Labels that tell engines of one exposition apart."""
_MAX = 1e30
_RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")
_MODEL = "model_name"
_ASKED = (
    "time_to_first_token_seconds_count", "prompt_tokens", "num_requests_running",
    "num_running_reqs",
)  # fmt: skip
"""What tells of an engine how much it is asked, the surest first."""

Labels = Mapping[str, str]


@dataclass(slots=True)
class _Series:
    labels: Labels
    values: list[float] = field(default_factory=list)
    """One a snapshot that has it."""
    numbers: list[int] = field(default_factory=list)
    """Those of the snapshots."""
    source: Source | None = None

    @property
    def growth(self) -> float:
        """Over the snapshots; with one, since the start."""
        first, *later = self.values
        if not later:
            return first
        steps = zip(self.values, later, strict=False)
        return sum(new - old if new >= old else new for old, new in steps)

    @property
    def is_reset(self) -> bool:
        return any(new < old for old, new in zip(self.values, self.values[1:], strict=False))


class Metrics:
    """All series of one server."""

    def __init__(self, documents: Sequence[Document], skipped: list[str]) -> None:
        """Of its snapshots, in the order of time; broken lines are added to `skipped`."""
        self._series: dict[str, dict[str, _Series]] = {}
        self._families: set[str] = set()
        self._speaking: dict[str, list[_Series]] = {}
        self.model = ""
        """The one that is asked most, where models are named."""
        self.left_out: frozenset[str] = frozenset()
        """The others: nothing of them is told."""
        for number, document in enumerate(_in_order(documents)):
            self._read(document, number, skipped)
        self._choose_model()

    def _read(self, document: Document, number: int, skipped: list[str]) -> None:
        seen: set[tuple[str, str]] = set()
        earlier = frozenset(self._families)
        for line, text in enumerate(document.text.splitlines(), start=1):
            if not _OURS.match(text):
                continue
            match = _SAMPLE.fullmatch(text)
            value = _number(match[4]) if match else None
            if match is None or value is None or abs(value) > _MAX:
                if match is None or match[4] != "NaN":
                    skipped.append(f"{document.path}:{line}: no sample")
                continue
            name = f"{match[1]}:{match[2].removesuffix('_total')}"
            labels = dict(_LABEL.findall(match[3] or ""))
            key = match[3] or ""
            series = self._series.setdefault(name, {}).setdefault(key, _Series(labels))
            if (name, key) in seen:
                continue
            seen.add((name, key))
            # What is not in an earlier snapshot was zero: series with labels come with their first
            # event.
            if not series.values and match[1] in earlier:
                series.values.append(0.0)
                series.numbers.append(number - 1)
            series.values.append(value)
            series.numbers.append(number)
            self._families.add(match[1])
            series.source = Source(path=document.path, line=line)

    def __contains__(self, name: str) -> bool:
        return name in self._series

    def source(self, name: str) -> Source:
        """Where its last sample stands."""
        sources = [each.source for each in self._series[name].values() if each.source]
        return max(sources, key=lambda source: (source.path, source.line or 0))

    @property
    def resets(self) -> Iterator[str]:
        """Names of counters that fell."""
        for name, found in self._series.items():
            if name.endswith(("_sum", "_count", "_bucket")) and any(
                each.is_reset for each in found.values()
            ):
                yield name

    def growth(self, name: str, **labels: str) -> float | None:
        """What a counter grew by, over all series with these labels; None if there is none."""
        return _sum(each.growth for each in self._matching(name, labels))

    def now(self, name: str, **labels: str) -> float | None:
        """The last value of a gauge, over all series with these labels."""
        last = max((each.numbers[-1] for each in self._matching(name, {})), default=0)
        found = self._matching(name, labels)
        # Engines that have gone by the last snapshot say no more.
        return _sum(each.values[-1] for each in found if each.numbers[-1] == last)

    def largest(self, name: str, *, busy: Sequence[str] = (), **labels: str) -> float | None:
        """The largest value of a gauge in any series and snapshot.

        Of those snapshots in which one of the gauges `busy` is not zero, where any of them is told.
        """
        told = [each for gauge in busy for each in self._matching(gauge, labels)]
        at = {
            n for each in told for n, value in zip(each.numbers, each.values, strict=True) if value
        }
        values = [
            value
            for each in self._matching(name, labels)
            for n, value in zip(each.numbers, each.values, strict=True)
            if n in at or not told
        ]
        return max(values, default=None)

    def num_series(self, name: str) -> int:
        """How many series tell it, such as one a rank."""
        return len(list(self._matching(name, {})))

    def labels(self, name: str, **labels: str) -> Labels:
        """Those of its last series, for metrics that tell by labels."""
        return next(reversed(list(self._matching(name, labels))), _Series({})).labels

    def values_of(self, name: str, label: str) -> tuple[str, ...]:
        """All values of a label."""
        found = (each.labels.get(label) for each in self._matching(name, {}))
        return tuple(dict.fromkeys(value for value in found if value is not None))

    def engines(self, name: str) -> list[dict[str, str]]:
        """Each engine that has a metric: the labels that tell it from the others."""
        found: list[dict[str, str]] = []
        for each in self._matching(name, {}):
            told = {label: each.labels[label] for label in _ENGINES if label in each.labels}
            if told not in found:
                found.append(told)
        return found

    def fullest(self, *names: str) -> dict[str, str]:
        """The engine with most of a gauge, then of the next one; nothing if there is only one."""
        engines = next(filter(None, map(self.engines, names)), [])
        if len(engines) < 2:
            return {}
        return max(engines, key=lambda who: [self.now(name, **who) or 0.0 for name in names])

    def mean_of_all_ranks(self, name: str) -> float | None:
        """Of a histogram of something that adds up over the ranks of an engine, such as a rate."""
        sums, counts = (self._series.get(f"{name}_{end}", {}) for end in ("sum", "count"))
        means = [
            sums[key].growth / counts[key].growth
            for key in sums.keys() & counts.keys()
            if counts[key].growth and sums[key].labels.get(_MODEL) not in self.left_out
        ]
        return sum(means) / max(1, len(self.engines(f"{name}_sum"))) if means else None

    def mean(self, name: str, **labels: str) -> float | None:
        """Of a histogram or summary."""
        total, count = self.growth(f"{name}_sum", **labels), self.growth(f"{name}_count", **labels)
        return total / count if total is not None and count else None

    def quantile(self, name: str, share: float) -> float | None:
        """Of a histogram, by linear interpolation inside its bucket; None beyond the last one."""
        bounds: dict[float, float] = {}
        for each in self._matching(f"{name}_bucket", {}):
            bound = _number(each.labels.get("le", ""))
            if bound is not None:
                bounds[bound] = bounds.get(bound, 0.0) + each.growth
        buckets = sorted(bounds.items())
        if not buckets or not buckets[-1][1]:
            return None
        wanted, below, seen = share * buckets[-1][1], 0.0, 0.0
        for bound, number in buckets:
            if number >= wanted:
                if bound == float("inf"):
                    return None
                return below + (bound - below) * (wanted - seen) / max(number - seen, 1.0)
            below, seen = bound, number
        return None

    def _matching(self, name: str, labels: Labels) -> Iterator[_Series]:
        if name not in self._speaking:
            self._speaking[name] = list(self._those_who_speak(name))
        for each in self._speaking[name]:
            if all(each.labels.get(key) == value for key, value in labels.items()):
                yield each

    def _those_who_speak(self, name: str) -> Iterator[_Series]:
        """Of the model that counts, and of ranks that say the same the first.

        SGLang's ranks do, of tokens and requests; its bytes are of each rank.
        """
        found = [
            each
            for each in self._series.get(name, {}).values()
            if each.labels.get(_MODEL) not in self.left_out
        ]
        if not name.startswith("sglang:") or "bytes" in name:
            yield from found
            return
        first: dict[frozenset[tuple[str, str]], _Series] = {}
        for each in sorted(found, key=_rank):
            rest = {pair for pair in each.labels.items() if pair[0] not in _RANKS}
            first.setdefault(frozenset(rest), each)
        speaking = {id(each) for each in first.values()}
        yield from (each for each in found if id(each) in speaking)

    def _choose_model(self) -> None:
        for asked in _ASKED:
            names = [f"{family}:{asked}" for family in ("vllm", "sglang")]
            models = dict.fromkeys(each for name in names for each in self.values_of(name, _MODEL))
            weights = {
                model: sum(self.growth(name, **{_MODEL: model}) or 0.0 for name in names)
                for model in models
            }
            if any(weights.values()):
                self.model = max(weights, key=lambda model: weights[model])
                self.left_out = frozenset(weights) - {self.model}
                break
        self._speaking.clear()


def _sum(values: Iterator[float]) -> float | None:
    found = list(values)
    return sum(found) if found else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value else None


def _rank(series: _Series) -> list[tuple[int, str]]:
    """For an order by rank; ranks are small numbers."""
    ranks = [series.labels.get(rank, "0") for rank in _RANKS]
    return [(len(rank), rank) for rank in ranks]


def _in_order(documents: Sequence[Document]) -> list[Document]:
    """As given, but by the start of the process where that differs: a restart comes later."""
    starts = [_START.search(document.text) for document in documents]
    times = [_number(start[1]) if start else None for start in starts]
    if None in times or len(set(times)) < 2:
        return list(documents)
    order = sorted(range(len(documents)), key=lambda index: times[index] or 0.0)
    return [documents[index] for index in order]
