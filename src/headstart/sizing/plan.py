"""The plan: every answer with its formula and its numbers put in. Pure.

The letters are those of `headstart.sizing.sizing`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headstart.sizing.answers import Answer
from headstart.sizing.architecture import ELEMENT_BITS, Architecture
from headstart.sizing.hardware import Machine
from headstart.sizing.load import Load
from headstart.sizing.prefill import token_formula
from headstart.sizing.queueing import Times
from headstart.sizing.sizing import Cell, Sizing

_MONTH_S = 30 * 86400.0
_CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128)
_NUM_CURVE = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All answers."""

    model: Architecture
    machine: Machine
    load: Load
    answers: tuple[Answer, ...]
    curve: tuple[tuple[int, float, float], ...]
    """Tokens, seconds to compute them, break-even bytes/s."""
    cells: tuple[Cell, ...]
    flips: tuple[tuple[int, int], ...]
    """Tokens, and the largest number of prompts at once at which the last load still wins."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Of the model, if it is a known one, and of the machine."""
        model = (f"{self.model.name}: {self.model.source}",) if self.model.source else ()
        return (*model, *self.machine.sources)


def make_plan(sizing: Sizing) -> Plan:
    """Everything. Raises ConfigError for more clients than can be simulated."""
    curve = tuple(
        (tokens, sizing.costs.prefill_s(0, tokens), sizing.break_even(tokens))
        for tokens in _lengths(sizing.model, _NUM_CURVE)
    )
    lengths = _lengths(sizing.model, 8)
    cells = tuple(sizing.cell(n, count) for n in lengths for count in _CONCURRENCIES)
    return Plan(
        model=sizing.model,
        machine=sizing.machine,
        load=sizing.load,
        answers=tuple(_answers(sizing)),
        curve=curve,
        cells=cells,
        flips=tuple((tokens, sizing.flip(tokens)) for tokens in lengths),
    )


def _lengths(model: Architecture, num: int) -> list[int]:
    """From 512 tokens to the longest context there is, evenly in the logarithm."""
    last = model.max_tokens
    first = min(512, last)
    steps = [first * (last / first) ** (step / (num - 1)) for step in range(num)]
    return sorted({round(step) for step in steps})


def _answers(sizing: Sizing) -> Iterator[Answer]:
    yield from _sizes(sizing)
    yield from _times(sizing)
    yield from _bandwidths(sizing)
    hit, miss = sizing.simulated(hits=True), sizing.simulated(hits=False)
    yield from _queued("hit", hit, sizing)
    yield from _queued("recompute", miss, sizing)
    yield from _needs(sizing)
    yield from _rebuild(sizing)
    yield from _money(sizing, hit)


def _sizes(sizing: Sizing) -> Iterator[Answer]:
    model, dtype, mean = sizing.model, sizing.dtype, sizing.mean
    bits = ELEMENT_BITS[dtype]
    per_token = float(model.token_nbytes(dtype))
    parts = " + ".join(
        f"{layer.count} {layer.kind} layers x {layer.elements}"
        for layer in model.layers
        if layer.elements and layer.kind != "window"
    )
    yield _answer(
        "kv_token_nbytes",
        "KV of one more token",
        per_token,
        "B",
        f"({parts or '0'}) elements x {float(bits):g} bits of {dtype} / 8",
    )
    full = float(model.token_nbytes(dtype, all_layers=True))
    if full != per_token:
        yield _answer(
            "kv_token_all_nbytes",
            "same, if the cache keeps windows whole",
            full,
            "B",
            "as before, with the window layers counted as if they had none",
        )
    num_gpus = sizing.machine.num_gpus
    yield _answer(
        "kv_token_rank_nbytes",
        "KV of one more token, a GPU",
        float(model.rank_token_nbytes(dtype, num_gpus)),
        "B",
        f"split over {num_gpus} GPUs as far as there are KV heads; latent: whole",
    )
    yield _answer(
        "kv_prompt_nbytes",
        f"KV of a mean prompt, {mean} tokens",
        model.prompt_nbytes(mean, dtype),
        "B",
        _prompt_formula(model, mean, dtype),
    )


def _prompt_formula(model: Architecture, tokens: int, dtype: str) -> str:
    bits = float(ELEMENT_BITS[dtype])
    parts = [f"{tokens} x {float(model.token_nbytes(dtype)):g} B"]
    for layer in model.layers:
        if layer.kind == "window":
            kept = min(tokens, layer.window - 1)
            parts.append(f"{layer.count} windows x {kept} x {layer.elements} x {bits:g} bits / 8")
        if layer.state_nbytes:
            parts.append(f"{layer.count} states x {layer.state_nbytes} B")
    return " + ".join(parts)


def _times(sizing: Sizing) -> Iterator[Answer]:
    costs, machine, mean = sizing.costs, sizing.machine, sizing.mean
    steps = f"{costs.step_s:.3g} s x {-(-mean // costs.max_step_tokens)} steps + "
    yield _answer(
        "prefill_s",
        f"prefill of {mean} tokens",
        costs.prefill_s(0, mean),
        "s",
        f"{steps}{costs.token_s:.4g} s x n + {costs.pair_s:.4g} s x n^2/2, n = {mean}; "
        + token_formula(sizing.model, machine, costs),
    )
    nbytes, engines = sizing.nbytes(mean), machine.num_engines
    copied = f"{nbytes} B / {costs.copy_bytes_per_s:.4g} B/s + T({sizing.held(mean)}, {mean})"
    others = ""
    if engines > 1:
        others = f"(1 + {1.0 - sizing.load.memory_share:g} x {engines - 1} others) x "
    yield _answer(
        "load_s",
        "its hit, read from the storage",
        sizing.cell(mean, 1).load_s,
        "s",
        f"{machine.latency_s:.2g} s + {others}{nbytes} B / {machine.read_bytes_per_s:.4g} B/s "
        f"+ {copied}",
    )
    yield _answer(
        "memory_hit_s",
        "its hit, copied from host memory",
        sizing.memory_hit_s(mean),
        "s",
        copied,
    )


def _bandwidths(sizing: Sizing) -> Iterator[Answer]:
    machine, mean = sizing.machine, sizing.mean
    yield _answer(
        "read_bytes_per_s",
        f"bandwidth of the storage, by {machine.slowest.name}",
        machine.read_bytes_per_s,
        "B/s",
        "the least of " + "; ".join(f"{each.name} {each.formula}" for each in machine.stages),
    )
    yield _answer(
        "link_bytes_per_s",
        "bandwidth of the links to one engine's GPUs",
        machine.link.bytes_per_s,
        "B/s",
        machine.link.formula,
    )
    nbytes = sizing.nbytes(mean)
    yield _answer(
        "break_even_bytes_per_s",
        "break-even bandwidth of one engine",
        sizing.break_even(mean),
        "B/s",
        f"V / (T(0, n) - T(h n, n) - latency - V / L) = {nbytes} B / "
        f"({sizing.saved_s(mean):.4g} s - {machine.latency_s:.2g} s - "
        f"{sizing.costs.copy_s(nbytes):.3g} s)",
    )


def _queued(what: str, times: Times, sizing: Sizing) -> Iterator[Answer]:
    load = sizing.load
    how = f"simulated: {sizing.machine.num_engines} engines x {load.concurrency} clients; " + (
        "reads share the storage equally, " if what == "hit" else ""
    )
    steps = (
        f"steps of up to {sizing.costs.max_step_tokens} prompt tokens, "
        f"{load.tpot_s:g} s longer while answers run"
    )
    for key, title, value in (
        ("p50_s", "p50", times.p50_s),
        ("p99_s", "p99", times.p99_s),
        ("burst_p50_s", "p50 of a cold start, all at once", times.burst_p50_s),
        ("burst_worst_s", "slowest of a cold start", times.burst_worst_s),
    ):
        yield _answer(f"{what}_ttft_{key}", f"TTFT, {what}: {title}", value, "s", how + steps)
    delay = (
        f"{how}{steps}; a step that copies or computes prompts gives each running answer one token"
    )
    yield _answer(f"{what}_tpot_p50_s", f"TPOT, {what}: p50", times.tpot_p50_s, "s", delay)
    yield _answer(f"{what}_tpot_p99_s", f"TPOT, {what}: p99", times.tpot_p99_s, "s", delay)
    yield _answer(
        f"{what}_output_tokens_per_s",
        f"output, {what}",
        times.requests_per_s * load.output_tokens,
        "tokens/s",
        f"{times.requests_per_s:.4g} requests/s x {load.output_tokens} tokens; {how}{steps}",
    )


def _needs(sizing: Sizing) -> Iterator[Answer]:
    load, machine = sizing.load, sizing.machine
    nbytes = sizing.nbytes(sizing.longest)
    yield _answer(
        "staging_nbytes",
        "staging memory, so that TPOT holds",
        load.concurrency * nbytes,
        "B",
        f"of each engine: {load.concurrency} prompts in flight x {nbytes} B of the longest "
        f"({sizing.longest} tokens)",
    )
    if machine.staging_nbytes:
        yield _answer(
            "staging_concurrency",
            "prompts in flight that the staging memory holds",
            machine.staging_nbytes // nbytes,
            "prompts an engine",
            f"floor({machine.staging_nbytes} / {nbytes} B); more, and decoding waits for loads",
        )
    even, memory = sizing.break_even(sizing.mean), load.memory_share
    often = f" / {1.0 - memory:g} of the hits that are read" if memory else ""
    yield _answer(
        "engines_fed",
        "engines that this storage feeds",
        sizing.engines_fed(),
        "engines",
        f"floor({machine.read_bytes_per_s:.4g} / {even:.4g} B/s{often}): so many can load at once "
        "and each still beats computing",
    )
    most = f"{machine.read_bytes_per_s:.4g} / {even:.4g} B/s"
    if memory:
        most = f"({most} - {memory:g}) / {1.0 - memory:g}"
    yield _answer(
        "flip_concurrency",
        "prompts at once until computing wins",
        sizing.flip(sizing.mean),
        "prompts an engine",
        f"floor({most} / {machine.num_engines} engines): the last of them waits as long as an idle "
        "GPU would compute",
    )


def _rebuild(sizing: Sizing) -> Iterator[Answer]:
    machine, mean = sizing.machine, sizing.mean
    pool = sizing.load.pool_tokens or 1000 * mean
    pool_nbytes = pool * sizing.model.prompt_nbytes(mean, sizing.dtype) / mean
    compute_s = pool / mean * sizing.costs.prefill_s(0, mean) / machine.num_engines
    write_s = pool_nbytes / machine.write_bytes_per_s
    yield _answer("pool_nbytes", f"pool of {pool} tokens", pool_nbytes, "B", f"{pool} x KV a token")
    if memory := sizing.load.memory_share:
        yield _answer(
            "memory_nbytes",
            "host memory for its share of the hits",
            memory * pool_nbytes,
            "B",
            f"{memory:g} x {pool_nbytes:.4g} B, if all prompts are asked alike; less where some "
            "are asked more often (headstart tune, with a trace)",
        )
    yield _answer(
        "rebuild_s",
        "cold rebuild of the pool, all lost",
        max(compute_s, write_s),
        "s",
        f"the longer of computing, {pool}/{mean} prompts x T(0, {mean}) / "
        f"{machine.num_engines} engines = {compute_s:.4g} s, and writing, "
        f"{pool_nbytes:.4g} B / ({machine.write_formula}) = {write_s:.4g} s",
    )
    yield _answer(
        "reread_s",
        "same, if the storage kept it: read back",
        pool_nbytes / machine.read_bytes_per_s,
        "s",
        f"{pool_nbytes:.4g} B / {machine.read_bytes_per_s:.4g} B/s",
    )


def _money(sizing: Sizing, hit: Times) -> Iterator[Answer]:
    machine = sizing.machine
    saved_s = sum(share * sizing.saved_s(tokens) for tokens, share in sizing.load.contexts)
    read = 1.0 - sizing.load.memory_share
    per_s = read * hit.requests_per_s * saved_s * machine.num_gpus
    how = (
        f"({read:g} read of {hit.requests_per_s:.4g} requests/s x {saved_s:.4g} s saved x "
        f"{machine.num_gpus} GPUs)"
    )
    if machine.storage_month:
        yield _answer(
            "cost_per_gpu_s",
            "price of a saved GPU second",
            machine.storage_month / _MONTH_S / per_s if per_s > 0 else math.inf,
            "",
            f"{machine.storage_month:g} a month / {_MONTH_S:.0f} s / {how}",
        )
    if machine.gpu_hour:
        price = machine.gpu_hour / 3600
        yield _answer(
            "gpu_s_price",
            "price of a bought GPU second",
            price,
            "",
            f"{machine.gpu_hour:g} an hour / 3600",
        )
        yield _answer(
            "saved_month",
            "price of the GPU seconds saved, a month",
            price * per_s * _MONTH_S,
            "",
            f"{price:.4g} x {_MONTH_S:.0f} s x {how}",
        )


def _answer(key: str, title: str, value: float, unit: str, formula: str) -> Answer:
    return Answer(key=key, title=title, value=value, unit=unit, formula=formula)
