"""vLLM's log: the statistics of V1 and V0, preemptions, KV transfers, the size of the cache.

V1's hit rates are of the last 1,000 requests; `/metrics` has them of a period. It never prints its
preemptions: it counts them from zero just before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from headstart.doctor.facts import Fact, Source, Value
from headstart.doctor.readers.loglines import (
    NUMBER,
    Flow,
    Place,
    Record,
    Spread,
    Sum,
    fact,
    source_of,
    tier,
    trend,
    workers,
)

_STATS = b"Avg prompt throughput: "
_V0_HITS = b"Prefix cache hit rate: GPU: "
_PREEMPTED = b"total_num_cumulative_preemption="
_TRANSFERS = b"KV Transfer metrics: "
_CACHE = b" KV cache size: "
_FAILED = b"KV load failure"
_VERSIONS = (b"vLLM API server version ", b"LLM engine (v")
_UNPINNED = (b"(unpinned DMA)", b"the offload region stays pageable")
_HTTP = b" HTTP/1.1"
_ANSWERS = (b"completions", b"/v1/responses", b"/v1/messages", b"/generate")
_OK = (b'" 200', b'\\" 200')

_TAG_NBYTES = 16
"""Of what stands right before a record: the engine is there."""
_ENGINE = re.compile(rb"Engine (\d+): *$")
_COMMON = re.compile(
    rb"[\d.]+ tokens/s, Avg generation throughput: %(n)b tokens/s, Running: %(n)b reqs, "
    rb"Waiting: %(n)b reqs(, [^%%\n]*)?, \w+ KV cache usage: %(n)b%%, "
    rb"Prefix cache hit rate: %(n)b%%(?:, External prefix cache hit rate: %(n)b%%)?"
    % {b"n": NUMBER}
)
"""How V1 nearly always writes it; what does not fit is read field by field."""
_MOST_TAILS = 1000
_PREEMPTIONS = b"Preemptions: "
_DEFERRED = b"Deferred: "
"""Of those waiting the ones that wait for a load, not for room."""
_SIZE = re.compile(rb"(\d[\d,]{,20}) tokens(?:.*?Maximum concurrency for (\d[\d,]{,20}) tokens)?")
_VERSION = re.compile(rb"v?(\d+\.\d+(?:\.\d+)?)")
_FAILING = re.compile(rb"Failing (\d+) request\(s\) due to $")
_RESCHEDULED = re.compile(rb": (\d+) request\(s\) rescheduled")
_TRANSFER = re.compile(
    rb"([A-Za-z][\w:]*(?: [\w/()]+)*)(?::\(([^)]*)\))?=(\d{1,20}(?:\.\d+)?(?:[eE][+-]?\d\d?)?)"
)
_MB = float(1 << 20)


class VllmLog:
    """See the module."""

    marks = (_STATS, _V0_HITS, _PREEMPTED, _TRANSFERS, _FAILED, _HTTP)
    settings = (_CACHE, *_VERSIONS, *_UNPINNED)

    def __init__(self) -> None:
        self._flows: dict[str, Flow] = {}
        self._names: dict[bytes, str] = {}
        self._last: dict[str, dict[str, tuple[float, Place]]] = {"local": {}, "external": {}}
        self._rates: dict[str, Spread] = {}
        self._throughput, self._requests = Sum(), Sum()
        self._preemptions, self._warned = Sum(), Sum()
        self._num_warned = 0.0
        self._failed = Sum()
        self._transfers: dict[tuple[str, str], Sum] = {}
        self._single: dict[str, Fact] = {}

    def take(self, record: Record) -> bool:
        """See `Parser`."""
        if record.mark == _STATS:
            return self._stats(record)
        if record.mark == _HTTP:
            block = record.block
            if block.startswith(_OK, record.last, record.end) and block.endswith(
                _ANSWERS, record.start, record.place
            ):
                self._requests.add(1, record)
            return True
        if record.mark in (_V0_HITS, _PREEMPTED):
            return self._counted(record)
        if record.mark == _TRANSFERS:
            return self._transfer(record)
        if record.mark == _FAILED:
            failed = _FAILING.search(record.before) or record.match(_RESCHEDULED)
            if failed:
                self._failed.add(float(failed[1]), record)
            return True
        return self._setting(record)

    def _stats(self, record: Record) -> bool:
        common = record.match(_COMMON)
        if common is None or record.has(b"External prefix", after=common.end()):
            return self._fields(record)
        generated, running, waiting, more, usage, local, external = common.groups()
        deferred = (record.number(_DEFERRED) or 0.0) if more else 0.0
        preempted = record.number(_PREEMPTIONS) if more else None
        self._line(
            record,
            running=float(running),
            waiting=max(0.0, float(waiting) - deferred),
            throughput=float(generated),
            usage=float(usage),
            preempted=preempted,
            hits=(float(local), None if external is None else float(external)),
        )
        return True

    def _fields(self, record: Record) -> bool:
        running, waiting = record.number(b"Running: "), record.number(b"Waiting: ")
        if waiting is None:  # V0, whose requests may wait in the CPU's memory, too
            waiting = record.number(b"Pending: ")
            waiting = None if waiting is None else waiting + (record.number(b"Swapped: ") or 0.0)
        throughput = record.number(b"Avg generation throughput: ")
        if running is None or waiting is None or throughput is None:
            return False
        self._line(
            record,
            running=running,
            waiting=max(0.0, waiting - (record.number(_DEFERRED) or 0.0)),
            throughput=throughput,
            # V0: of the device first, then of the CPU
            usage=record.number(b" KV cache usage: "),
            preempted=record.number(_PREEMPTIONS),
            hits=(
                record.number(b", Prefix cache hit rate: "),
                record.number(b"External prefix cache hit rate: "),
            ),
        )
        return True

    def _engine(self, record: Record) -> str:
        tail = record.tail(_TAG_NBYTES)
        name = self._names.get(tail)
        if name is None:
            engine = _ENGINE.search(tail)
            name = f"engine {int(engine[1])}" if engine else ""
            if len(self._names) < _MOST_TAILS:
                self._names[tail] = name
        return name

    def _line(
        self,
        record: Record,
        *,
        running: float,
        waiting: float,
        throughput: float,
        usage: float | None,
        preempted: float | None,
        hits: tuple[float | None, float | None],
    ) -> None:
        """One line of statistics; shares in percent, hits of the device and of others."""
        name = self._engine(record)
        flow = self._flows.get(name)
        if flow is None:
            flow = self._flows[name] = Flow()
        flow.add(running, waiting, None if usage is None else usage / 100, record)
        if running:
            self._throughput.add(throughput, record)
        if preempted is not None:
            self._preemptions.add(preempted, record)
        local, external = hits
        if local is None:
            return
        self._now("local", name, local / 100, record)
        if external is not None:
            self._now("external", name, external / 100, record)
        if running:
            rate = 1 - (1 - local / 100) * (1 - (external or 0.0) / 100)
            rates = self._rates.get(name)
            if rates is None:
                rates = self._rates[name] = Spread()
            rates.add(rate, record)

    def _now(self, key: str, name: str, value: float, record: Record) -> None:
        self._last[key][name] = (value if value < 1.0 else 1.0, (record.path, record.line))

    def _counted(self, record: Record) -> bool:
        value = record.number(b"")
        if value is None:
            return False
        if record.mark == _V0_HITS:
            self._now("local", "", value / 100, record)
        else:
            # Of one process it only grows; a smaller number is of the next one.
            if value < self._num_warned:
                self._preemptions.add(self._num_warned, record)
            self._num_warned = value
            self._warned.add(value, record)
        return True

    def _transfer(self, record: Record) -> bool:
        found = _TRANSFER.findall(record.text)
        told = {name.decode(): float(value) for name, _, value in found}
        for name, labels, value in found:
            key = (name.decode().strip(), labels.decode().strip("', "))
            self._transfers.setdefault(key, Sum()).add(float(value), record)
        # NIXL tells means; what adds up is their sum.
        count = told.get("Num successful transfers", 1.0 if "Avg xfer time (ms)" in told else 0.0)
        for mean, name, factor in (
            ("Avg xfer time (ms)", "nixl seconds", 1e-3),
            ("Avg MB per transfer", "nixl bytes", _MB),
        ):
            if mean in told and count:
                total = count * told[mean] * factor
                self._transfers.setdefault((name, ""), Sum()).add(total, record)
        return bool(found)

    def _setting(self, record: Record) -> bool:
        told: dict[str, Value] = {}
        if record.mark in _UNPINNED:
            told["pinned"] = False
        elif record.mark == _CACHE:
            size = record.match(_SIZE)
            if size:
                told["pool_tokens"] = float(size[1].replace(b",", b""))
                if size[2]:
                    told["max_model_len"] = float(size[2].replace(b",", b""))
        else:
            version = record.match(_VERSION)
            if version:
                told["engine_version"] = version[1].decode()
        for key, value in told.items():
            self._single[key] = fact(key, value, source_of(record.at))
        return bool(told)

    def facts(self) -> Iterator[Fact]:
        """See `Parser`."""
        if self._flows:
            name, busiest = max(self._flows.items(), key=lambda each: each[1].typical_waiting)
            yield fact("engine", "vllm", busiest.source)
            yield from busiest.facts()
            yield from trend(self._rates.get(name, Spread()), busiest)
        yield from self._single.values()
        yield from self._hits()
        if self._throughput.count:
            yield fact("throughput", self._throughput.mean, self._throughput.source)
        if self._requests.count:
            yield fact("num_requests", self._requests.total, self._requests.source)
        preempted = self._preemptions if self._preemptions.count else self._warned
        count = self._preemptions.total + self._num_warned
        if count:
            yield fact("num_preemptions", count, preempted.source)
        yield from workers(self._flows, self._last["local"])
        if self._failed.count:
            told: dict[str, Value] = {"num_failed_reads": self._failed.total}
            yield from tier("KV connector", self._failed.source, told)
        yield from self._tiers()

    def _hits(self) -> Iterator[Fact]:
        """Of all engines, each by the requests that it runs: an idle one prints its zero, too."""
        missed, source = 1.0, Source(path="")
        for key, rates in self._last.items():
            if rates:
                weights = {
                    name: self._flows[name].means[0] if name in self._flows else 0.0
                    for name in rates
                }
                if not any(weights.values()):
                    weights = dict.fromkeys(rates, 1.0)
                total = sum(weights.values())
                rate = sum(weights[name] / total * value for name, (value, _) in rates.items())
                source = source_of(next(iter(rates.values()))[1])
                yield fact(f"{key}_hit_rate", rate, source)
                missed *= 1.0 - rate
        if self._last["local"]:
            yield fact("hit_rate", 1.0 - missed, source)

    def _tiers(self) -> Iterator[Fact]:
        def total(name: str, label: str = "") -> float:
            found = self._transfers.get((name, label))
            return found.total if found else 0.0

        def add(
            into: str, read: float, seconds: float, written: float, kind: str
        ) -> Iterator[Fact]:
            if read or written:
                source = next(reversed(self._transfers.values())).source
                told: dict[str, Value] = {"read": read, "written": written, "kind": kind}
                if read and seconds:
                    told["bandwidth"] = read / seconds
                yield from tier(into, source, told)

        offload = "vllm:kv_offload_"
        down, up = "GPU_to_CPU", "CPU_to_GPU"
        yield from add(
            "host memory",
            total(offload + "load_bytes")
            or total(offload + "total_bytes", up)
            or total(f"{up}_total_bytes"),
            total(offload + "load_time")
            or total(offload + "total_time", up)
            or total(f"{up}_total_time"),
            total(offload + "store_bytes")
            or total(offload + "total_bytes", down)
            or total(f"{down}_total_bytes"),
            "memory",
        )
        labels = {label for name, label in self._transfers if "_tiering_" in name}
        for label in sorted(labels - {""}):
            read, seconds, written = (
                total(f"{offload}tiering_{each}", label)
                for each in ("read_bytes", "read_time", "write_bytes")
            )
            yield from add(
                label, read, seconds, written, "memory" if "primary" in label else "file"
            )
        yield from add("nixl", total("nixl bytes"), total("nixl seconds"), 0.0, "network")
        if total("hits"):
            yield from self._headstart(max(total("lookups"), total("hits")), total("load_bytes"))

    def _headstart(self, requests: float, nbytes: float) -> Iterator[Fact]:
        """Headstart's own sums (see headstart.engines.vllm.stats), over all that were looked up."""
        waited, copied = (
            self._transfers.get((name, "")) for name in ("wait_seconds", "load_copy_seconds")
        )
        if copied is None:
            return
        seconds = copied.total + (waited.total if waited else 0.0)
        yield fact("connector", "headstart", copied.source)
        yield fact("load", seconds / requests, copied.source)
        yield fact("load_nbytes", nbytes / requests, copied.source)
