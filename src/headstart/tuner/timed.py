"""What came of a search: the front, what is recommended and why, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headstart.sizing.answers import format_duration
from headstart.tuner.case import MEMORY_WEIGHT, Case, Setting, Site, Timed
from headstart.tuner.latency import Latency, Loads
from headstart.tuner.recipe import (
    ENGINE_BLOCK_SIZES,
    engine_block_size,
    engine_flags,
    max_blocks,
    settings_toml,
)
from headstart.tuner.search import MET_SHARE, front, gain, recommended
from headstart.units import format_nbytes

_MANY_SLOWER = 0.01
_LEAST_TOLD = 0.0005


@dataclass(frozen=True, kw_only=True, eq=False)
class Times:
    """All that was tried; the first is no cache at all."""

    case: Case
    tried: tuple[Timed, ...]
    time_gain: float
    is_interrupted: bool = False

    @property
    def without(self) -> Timed:
        """No cache, but the engine's own."""
        return self.tried[0]

    @cached_property
    def front(self) -> list[Timed]:
        """What nothing beats, by price."""
        return front(self.tried)

    @cached_property
    def best(self) -> Timed | None:
        """What is recommended; None: no cache."""
        return recommended(self.tried, self.time_gain)

    def near(self, *free: str) -> list[Timed]:
        """Those that differ from the best only in these fields of its setting."""
        if self.best is None:
            return []
        same = [name for name in Setting.__dataclass_fields__ if name not in free]
        wanted = self.best.setting
        return [
            each
            for each in self.tried
            if all(getattr(each.setting, name) == getattr(wanted, name) for name in same)
        ]


def format_setting(setting: Setting) -> str:
    """For people."""
    if not setting.memory_nbytes:
        return "no cache"
    parts = [f"{format_nbytes(setting.memory_nbytes)} of memory"]
    if setting.file_nbytes:
        parts.append(f"{format_nbytes(setting.file_nbytes)} of drives")
    return " and ".join(parts)


def reasons(times: Times) -> list[str]:
    """Why that is recommended."""
    best, without = times.best, times.without
    if best is None and (without.latency.slo_share or 0.0) >= MET_SHARE:
        return [f"{MET_SHARE:.0%} of the requests meet the service level without a cache"]
    if best is None:
        return ["no capacity that was tried makes times shorter by what is worth it"]
    found = [
        f"TTFT p50 {_s(best.latency.p50_s)}, p99 {_s(best.latency.p99_s)}; without a cache "
        f"{_s(without.latency.p50_s)} and {_s(without.latency.p99_s)}",
        _doubled(times, best) if best.latency.slo_share is None else _met(best.latency.slo_share),
    ]
    for title, name in (("blocks", "block_size"), ("policies", "policy"), ("load", "loads")):
        others = times.near(name)
        if len(others) > 1:
            told = ", ".join(
                f"{getattr(each.setting, name)} {_s(each.latency.p50_s)}" for each in others
            )
            found.append(f"p50 by {title} there: {told}")
    if best.cost_per_gpu_s is not None:
        found.append(_price(times, best, best.cost_per_gpu_s))
    return found


def _price(times: Times, best: Timed, cost_per_gpu_s: float) -> str:
    told = f"a saved GPU second costs {cost_per_gpu_s:.3g}"
    if best.saved_month is None:
        return told
    told += f", and is worth {times.case.site.machine.gpu_hour / 3600:.3g}"
    if best.pays:
        return f"{told}: {(best.cost_month or 0.0):,.0f} a month save {best.saved_month:,.0f}"
    if times.without.latency.slo_share is not None:
        return f"{told}: the service level is what is paid for"
    return f"{told}: nothing that was tried saves what it costs"


def _met(share: float) -> str:
    if share >= MET_SHARE:
        return f"the cheapest with which {MET_SHARE:.0%} of the requests meet the service level"
    return f"nothing that was tried has more than {share:.1%} of the requests in the service level"


def _doubled(times: Times, best: Timed) -> str:
    """What up to twice the price gives."""
    more = [each for each in times.front if best.weight < each.weight <= 2.0 * best.weight]
    most = max(more, key=lambda each: gain(best, each), default=best)
    share = gain(best, most)
    if share < _LEAST_TOLD:
        return "nothing that was tried for up to twice as much is better"
    return (
        f"the best for up to twice as much, {format_setting(most.setting)}, has times that are "
        f"{share:.1%} shorter (p50, p99 and the rate, in the mean)"
    )


def notes(times: Times) -> list[str]:
    """What has to be known besides."""
    return list(_notes(times))


def _notes(times: Times) -> Iterator[str]:
    case, shown = times.case, times.best or times.without
    site, latency = case.site, shown.latency
    if times.is_interrupted:
        yield f"interrupted: only {len(times.tried):,} settings were tried"
    if shown.cost_month is None:
        yield (
            f"no prices were given: a byte of memory counts as {MEMORY_WEIGHT} of a drive; "
            "memory_gib_month and storage_gib_month of the hardware file tell better"
        )
    yield from _notes_of_queues(times, latency)
    if shown.write_bytes_per_s > site.machine.write_bytes_per_s:
        yield (
            f"the drives would have to write {shown.write_bytes_per_s / 1e9:.3g} GB/s and write "
            f"{site.machine.write_bytes_per_s / 1e9:.3g}: not all that is hit here will be held"
        )
    if shown.slower_share > _MANY_SLOWER:
        yield (
            f"{shown.slower_share:.1%} of the requests get their first token later than without a "
            "cache: they wait for what others load or compute"
        )
    if not case.recorded.has_times:
        yield "the trace tells no times; those of its sessions are made up by --rate"
    if case.num_too_long:
        yield (
            f"{case.num_too_long:,} prompts are longer than the {site.model.max_tokens:,} tokens "
            f"of {site.model.name}"
        )
    size = shown.setting.block_size
    if size > ENGINE_BLOCK_SIZES[0]:
        yield (
            f"engines are run with blocks of at most {ENGINE_BLOCK_SIZES[0]} tokens: what such "
            f"hit more than blocks of {size:,}, the trace does not tell"
        )
    elif engine_block_size(size) != size:
        yield f"engines are not run with blocks of {size} tokens"
    if site.level.slo.note:
        yield site.level.slo.note


def _notes_of_queues(times: Times, shown: Latency) -> Iterator[str]:
    case = times.case
    if case.concurrency is not None:
        yield f"a closed loop of {case.concurrency:,} at once: the trace's times are not used"
    elif shown.offered >= 1.0:
        engines = -int(-case.site.machine.num_engines * shown.offered // 1)
        yield (
            f"overloaded: what is asked keeps engines busy for {shown.offered:.2f} of the time, "
            f"so that the queue only grows: num_engines of the hardware file has to be {engines} "
            "at least, or sample the trace"
        )
    elif times.without.latency.offered >= 1.0:
        yield "without a cache the engines are overloaded: that TTFT is of a queue that only grows"


def point_document(timed: Timed) -> dict[str, Any]:
    """A setting and what it gives, as JSON has it."""
    setting, latency = timed.setting, timed.latency
    return {
        "policy": setting.policy,
        "block_size": setting.block_size,
        "memory_nbytes": setting.memory_nbytes,
        "file_nbytes": setting.file_nbytes,
        "load": str(setting.loads),
        "block_hit_last_half": timed.block_hit,
        "token_hit_last_half": timed.token_hit,
        "ttft_s": {
            "p50": latency.p50_s,
            "p90": latency.p90_s,
            "p99": latency.p99_s,
            "mean": latency.mean_s,
        },
        "slo_share": latency.slo_share,
        "goodput_per_s": latency.goodput_per_s,
        "most_requests_per_s": latency.most_per_s,
        "bound_by": latency.bound_by,
        "offered_load": latency.offered,
        "token_shares": latency.shares,
        "saved_share": latency.saved_share,
        "saved_gpu_s_month": timed.saved_gpu_s_month,
        "slower_share": timed.slower_share,
        "write_bytes_per_s": timed.write_bytes_per_s,
        "cost_month": timed.cost_month,
        "saved_month": timed.saved_month,
        "cost_per_gpu_s": timed.cost_per_gpu_s,
    }


def timed_document(times: Times) -> dict[str, Any]:
    """What `headstart.tune/1` has more, or instead, where times are simulated."""
    site, best = times.case.site, times.best
    machine, slo = site.machine, site.level.slo
    return {
        "latency": {
            "model": site.model.name,
            "kv_dtype": site.kv_dtype or site.model.dtype,
            "gpu": machine.gpu.name,
            "num_gpus": machine.num_gpus,
            "num_engines": machine.num_engines,
            "sources": list(machine.sources),
            "slo": dict(slo.limits),
            "tpot_s": site.level.tpot_s,
            "concurrency": times.case.concurrency,
            "engine_kv_nbytes": site.engine_kv_nbytes,
            "interrupted": times.is_interrupted,
            "without": point_document(times.without),
            "points": [point_document(each) for each in times.tried],
            "notes": notes(times),
        },
        "pareto": [_with_tokens(site, each) for each in times.front],
        "recommended": _recommended(times, best),
    }


def _with_tokens(site: Site, timed: Timed) -> dict[str, Any]:
    """With its capacity as points of hits have it: tokens of the larger tier, which has all."""
    setting = timed.setting
    nbytes = max(setting.memory_nbytes, setting.file_nbytes)
    tokens = nbytes // site.block_nbytes(setting.block_size) * setting.block_size
    return {**point_document(timed), "capacity_tokens": tokens or None}


def _recommended(times: Times, best: Timed | None) -> dict[str, Any]:
    site = times.case.site
    shown = _with_tokens(site, best or times.without)
    shown["reasons"] = reasons(times)
    shown["settings"] = None
    if best is not None:
        shown["settings"] = {
            "headstart_toml": settings_toml(site, best),
            "engine_block_size": engine_block_size(best.setting.block_size),
            "engine_flags": engine_flags(site, best),
            "max_blocks": max_blocks(site, best),
        }
    return shown


def point_rows(times: Times, points: list[Timed]) -> tuple[list[str], list[list[str]]]:
    """Titles, and a line for each point."""
    has_slo = bool(times.case.site.level.slo.limits)
    has_price = times.without.cost_month is not None
    has_worth = times.without.saved_month is not None
    titles = ["memory", "drives", "block", "policy", "load", "TTFT p50", "p90", "p99"]
    titles += ["in SLO"] * has_slo + ["most req/s", "by", "GPU saved"] + ["a month"] * has_price
    titles += ["saves"] * has_worth
    rows = []
    for each in points:
        setting, latency = each.setting, each.latency
        row = [format_nbytes(nbytes) if nbytes else "-" for nbytes in _sizes(setting)]
        row += [f"{setting.block_size:,}", setting.policy, str(setting.loads)]
        if not setting.memory_nbytes:
            row[2:] = ["-"] * 3
        row += [_s(time) for time in (latency.p50_s, latency.p90_s, latency.p99_s)]
        row += [f"{latency.slo_share or 0.0:.1%}"] * has_slo
        row += [f"{latency.most_per_s:.3g}", latency.bound_by, f"{latency.saved_share:.1%}"]
        row += [f"{each.cost_month or 0.0:,.0f}"] * has_price
        row += [f"{each.saved_month or 0.0:,.0f}"] * has_worth
        rows.append([*row, "recommended" if each is times.best else ""])
    return [*titles, ""], rows


def _sizes(setting: Setting) -> tuple[int, int]:
    return setting.memory_nbytes, setting.file_nbytes


def overview(times: Times) -> list[tuple[str, str]]:
    """What it comes to."""
    best, site = times.best, times.case.site
    rows = [("on", f"{site.machine.num_engines} x {site.machine.num_gpus} {site.machine.gpu.name}")]
    if best is None:
        rows.append(("recommended", "no cache for this load on this machine"))
    else:
        setting, latency = best.setting, best.latency
        is_knee = latency.slo_share is None
        rows += [
            ("recommended capacities", format_setting(setting) + " (the knee)" * is_knee),
            ("recommended policy", setting.policy),
            ("recommended block size", f"{setting.block_size:,} tokens"),
            ("recommended load", _LOADS[setting.loads]),
            ("tokens", format_shares(latency.shares)),
            ("most requests a second", f"{latency.most_per_s:.3g}, by the {latency.bound_by}"),
        ]
        if latency.slo_share is not None:
            goodput = latency.goodput_per_s or 0.0
            rows.append((f"{site.level.slo}", f"{latency.slo_share:.1%}, {goodput:.3g} a second"))
        num_gpus = site.machine.num_gpus
        rows.append(
            (
                "GPU seconds saved",
                f"{latency.saved_share:.1%}: {_s(latency.saved_s * num_gpus)} of "
                f"{_s((latency.saved_s + latency.compute_s) * num_gpus)} to compute it all",
            )
        )
        held = max_blocks(site, best)
        told = ", ".join(f"{name} {count:,}" for name, count in held.items())
        size = engine_block_size(setting.block_size)
        rows.append(("blocks that fit", f"{told}, of {size} tokens"))
    rows += [("because", reason) for reason in reasons(times)]
    rows += [("note", note) for note in notes(times)]
    return rows


_LOADS = {
    Loads.PLANNED: "planned: what comes sooner than it is computed",
    Loads.ALWAYS: "always: all that is held",
}


def format_shares(shares: dict[str, float]) -> str:
    """Of tokens, by where they came from; what gave none is left out."""
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share)


def _s(seconds: float) -> str:
    return format_duration(seconds)
