"""The plan: what hits need of a machine for a model and a load, and what they give. Pure.

Every answer has its formula with its numbers; n is the tokens of a prompt, h its held share, T the
prefill time of `headstart.sizing.prefill`, V the bytes to load.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headstart.costs import EngineCosts, ReadCosts
from headstart.errors import ConfigError
from headstart.sizing.answers import Answer
from headstart.sizing.architecture import ELEMENT_BITS, Architecture
from headstart.sizing.contexts import Contexts, mean_tokens
from headstart.sizing.hardware import Machine, with_split
from headstart.sizing.prefill import break_even_bytes_per_s
from headstart.sizing.queueing import Times, Work, simulate

_MONTH_S = 30 * 86400.0
_CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128)
_NUM_CURVE = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of the engines."""

    contexts: Contexts
    concurrency: int
    """Requests under way at once, of each engine."""
    hit_share: float = 1.0
    """Of each prompt's tokens that the storage holds."""
    output_tokens: int = 256
    tpot_s: float = 0.03
    pool_tokens: int = 0
    """To be rebuilt after everything was lost; 0: a thousand mean prompts."""
    kv_dtype: str = ""
    """Empty: the model's."""

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.output_tokens < 1 or self.pool_tokens < 0:
            raise ConfigError("concurrency and output tokens must be at least 1")
        if not 0.0 < self.hit_share <= 1.0:
            raise ConfigError(f"hit share {self.hit_share:g} must be above 0, up to 1")
        if not 0.0 <= self.tpot_s < math.inf:
            raise ConfigError(f"time per output token {self.tpot_s:g} s must be 0 or more")
        if self.kv_dtype and self.kv_dtype not in ELEMENT_BITS:
            allowed = ", ".join(ELEMENT_BITS)
            raise ConfigError(f"KV dtype {self.kv_dtype!r} is unknown; allowed: {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One of so many prompts that come at once, all held, the last of them on the device."""

    tokens: int
    concurrency: int
    load_s: float
    recompute_s: float

    @property
    def ratio(self) -> float:
        """Below 1: the hit comes first."""
        return self.load_s / self.recompute_s


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


class Sizing:
    """Answers for one model, machine and load."""

    def __init__(
        self, model: Architecture, machine: Machine, load: Load, costs: EngineCosts
    ) -> None:
        for tokens, _ in load.contexts:
            model.check_tokens(tokens)
        self.model, self.load, self.costs = model, load, costs
        self.machine = with_split(machine, model.split(machine.num_gpus))
        self.dtype = load.kv_dtype or model.dtype
        self.mean = round(mean_tokens(load.contexts))
        self.longest = max(tokens for tokens, _ in load.contexts)

    def plan(self) -> Plan:
        """Everything."""
        curve = tuple(
            (tokens, self.costs.prefill_s(0, tokens), self.break_even(tokens))
            for tokens in self._lengths(_NUM_CURVE)
        )
        lengths = self._lengths(8)
        cells = tuple(self.cell(n, count) for n in lengths for count in _CONCURRENCIES)
        return Plan(
            model=self.model,
            machine=self.machine,
            load=self.load,
            answers=tuple(self._answers()),
            curve=curve,
            cells=cells,
            flips=tuple((tokens, self.flip(tokens)) for tokens in lengths),
        )

    def held(self, tokens: int) -> int:
        """Tokens of a prompt that are loaded: never the last one."""
        return min(tokens - 1, int(self.load.hit_share * tokens))

    def nbytes(self, tokens: int) -> int:
        """Bytes that its hit loads."""
        return self.model.prompt_nbytes(self.held(tokens), self.dtype)

    def saved_s(self, tokens: int) -> float:
        """Seconds of computing that the hit spares."""
        costs = self.costs
        return costs.prefill_s(0, tokens) - costs.prefill_s(self.held(tokens), tokens)

    def break_even(self, tokens: int) -> float:
        """Bytes/s that one engine's loads must come at."""
        return break_even_bytes_per_s(
            self.nbytes(tokens), self.saved_s(tokens), self.machine.latency_s
        )

    def cell(self, tokens: int, count: int) -> Cell:
        """The last of `count` prompts of each engine that are loaded at once, against computing."""
        nbytes = self.nbytes(tokens)
        ahead = (count * self.machine.num_engines - 1) * nbytes
        reads = ReadCosts(
            fixed_s=self.machine.latency_s,
            bytes_per_s=self.machine.read_bytes_per_s,
            ahead_nbytes=ahead,
        )
        rest_s = self.costs.prefill_s(self.held(tokens), tokens)
        return Cell(
            tokens=tokens,
            concurrency=count,
            load_s=reads.read_s(nbytes) + rest_s,
            recompute_s=self.costs.prefill_s(0, tokens),
        )

    def flip(self, tokens: int) -> int:
        """Prompts at once, of an engine, up to which the last load beats computing."""
        most = self.machine.read_bytes_per_s / self.break_even(tokens)
        return int(most / self.machine.num_engines)

    def works(self, *, hits: bool) -> list[Work]:
        """The load, for the simulation."""
        decode_s = self.load.output_tokens * self.load.tpot_s
        return [
            Work(
                share=share,
                load_nbytes=self.nbytes(tokens) if hits else 0,
                fixed_s=self.machine.latency_s if hits else 0.0,
                compute_s=self.costs.prefill_s(self.held(tokens) if hits else 0, tokens),
                decode_s=decode_s,
            )
            for tokens, share in self.load.contexts
        ]

    def _lengths(self, num: int) -> list[int]:
        """From 512 tokens to the longest context there is, evenly in the logarithm."""
        last = self.model.max_tokens
        first = min(512, last)
        steps = [first * (last / first) ** (step / (num - 1)) for step in range(num)]
        return sorted({round(step) for step in steps})

    def _answers(self) -> Iterator[Answer]:
        yield from self._sizes()
        yield from self._times()
        hit, miss = self._simulated()
        yield from _queued("hit", hit, self.load, self.machine)
        yield from _queued("recompute", miss, self.load, self.machine)
        yield from self._needs()
        yield from self._rebuild()
        yield from self._money(hit)

    def _simulated(self) -> tuple[Times, Times]:
        found = [
            simulate(
                self.works(hits=hits),
                clients=self.load.concurrency,
                engines=self.machine.num_engines,
                bytes_per_s=self.machine.read_bytes_per_s,
            )
            for hits in (True, False)
        ]
        return found[0], found[1]

    def _sizes(self) -> Iterator[Answer]:
        model, bits = self.model, ELEMENT_BITS[self.dtype]
        per_token = float(model.token_nbytes(self.dtype))
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
            f"({parts or '0'}) elements x {float(bits):g} bits of {self.dtype} / 8",
        )
        full = float(model.token_nbytes(self.dtype, all_layers=True))
        if full != per_token:
            yield _answer(
                "kv_token_all_nbytes",
                "same, if the cache keeps windows whole",
                full,
                "B",
                "as before, with the window layers counted as if they had none",
            )
        rank = float(model.rank_token_nbytes(self.dtype, self.machine.num_gpus))
        yield _answer(
            "kv_token_rank_nbytes",
            "KV of one more token, a GPU",
            rank,
            "B",
            f"split over {self.machine.num_gpus} GPUs as far as there are KV heads; latent: whole",
        )
        yield _answer(
            "kv_prompt_nbytes",
            f"KV of a mean prompt, {self.mean} tokens",
            model.prompt_nbytes(self.mean, self.dtype),
            "B",
            f"{self.mean} x {per_token:g} B, windows and states once",
        )

    def _times(self) -> Iterator[Answer]:
        costs, mean = self.costs, self.mean
        held = self.held(mean)
        steps = f"{costs.step_s:.3g} s x {-(-mean // costs.max_step_tokens)} steps + "
        yield _answer(
            "prefill_s",
            f"prefill of {mean} tokens",
            costs.prefill_s(0, mean),
            "s",
            f"{steps}{costs.token_s:.4g} s x n + {costs.pair_s:.4g} s x n^2/2, n = {mean}"
            f" ({self.model.active_parameters:.4g} parameters, {self.model.parameters_from})",
        )
        cell = self.cell(mean, 1)
        slowest = self.machine.slowest
        engines = self.machine.num_engines
        yield _answer(
            "load_s",
            "load of its hit and the rest computed",
            cell.load_s,
            "s",
            f"{self.machine.latency_s:.2g} s + {engines} x {self.nbytes(mean)} B / "
            f"{slowest.bytes_per_s:.4g} B/s + T({held}, {mean})",
        )
        yield _answer(
            "read_bytes_per_s",
            f"bandwidth of all engines, by {slowest.name}",
            slowest.bytes_per_s,
            "B/s",
            "the least of "
            + "; ".join(f"{each.name} {each.formula}" for each in self.machine.stages),
        )
        yield _answer(
            "break_even_bytes_per_s",
            "break-even bandwidth of one engine",
            self.break_even(mean),
            "B/s",
            f"V / (T(0, n) - T(h n, n) - latency) = {self.nbytes(mean)} B / "
            f"({self.saved_s(mean):.4g} s - {self.machine.latency_s:.2g} s)",
        )

    def _needs(self) -> Iterator[Answer]:
        load, machine = self.load, self.machine
        nbytes = self.nbytes(self.longest)
        yield _answer(
            "staging_nbytes",
            "staging memory, so that TPOT holds",
            load.concurrency * nbytes,
            "B",
            f"of each engine: {load.concurrency} prompts in flight x {nbytes} B of the longest "
            f"({self.longest} tokens)",
        )
        if machine.staging_nbytes:
            yield _answer(
                "staging_concurrency",
                "prompts in flight that the staging memory holds",
                machine.staging_nbytes // nbytes,
                "prompts an engine",
                f"floor({machine.staging_nbytes} / {nbytes} B); more, and decoding waits for loads",
            )
        even = self.break_even(self.mean)
        yield _answer(
            "engines_fed",
            "engines that this storage feeds",
            math.floor(machine.slowest.bytes_per_s / even) if math.isfinite(even) else 0,
            "engines",
            f"floor({machine.slowest.bytes_per_s:.4g} / {even:.4g} B/s): so many can load at once "
            "and each still beats computing",
        )
        yield _answer(
            "flip_concurrency",
            "prompts at once until computing wins",
            self.flip(self.mean),
            "prompts an engine",
            f"floor(bandwidth / break-even / {machine.num_engines} engines): the last of them "
            "waits as long as an idle GPU would compute",
        )

    def _rebuild(self) -> Iterator[Answer]:
        machine, mean = self.machine, self.mean
        pool = self.load.pool_tokens or 1000 * mean
        per_token = self.model.prompt_nbytes(mean, self.dtype) / mean
        compute_s = pool / mean * self.costs.prefill_s(0, mean) / machine.num_engines
        write_s = pool * per_token / machine.write_bytes_per_s
        yield _answer(
            "pool_nbytes", f"pool of {pool} tokens", pool * per_token, "B", f"{pool} x KV a token"
        )
        yield _answer(
            "rebuild_s",
            "cold rebuild of the pool, all lost",
            max(compute_s, write_s),
            "s",
            f"the longer of computing, {pool}/{mean} prompts x T(0, {mean}) / "
            f"{machine.num_engines} engines = {compute_s:.4g} s, and writing, "
            f"{pool * per_token:.4g} B / ({machine.write_formula}) = {write_s:.4g} s",
        )
        read_s = pool * per_token / machine.read_bytes_per_s
        yield _answer(
            "reread_s",
            "same, if the storage kept it: read back",
            read_s,
            "s",
            f"{pool * per_token:.4g} B / {machine.read_bytes_per_s:.4g} B/s",
        )

    def _money(self, hit: Times) -> Iterator[Answer]:
        machine = self.machine
        if not machine.storage_month:
            return
        saved_s = sum(share * self.saved_s(tokens) for tokens, share in self.load.contexts)
        per_s = hit.requests_per_s * saved_s * machine.num_gpus
        cost = machine.storage_month / _MONTH_S / per_s if per_s > 0 else math.inf
        compared = f"; a GPU second costs {machine.gpu_hour / 3600:.4g}" if machine.gpu_hour else ""
        yield _answer(
            "cost_per_gpu_s",
            "price of a saved GPU second",
            cost,
            "",
            f"{machine.storage_month:g} a month / {_MONTH_S:.0f} s / ({hit.requests_per_s:.4g} "
            f"requests/s x {saved_s:.4g} s saved x {machine.num_gpus} GPUs){compared}",
        )


def _queued(what: str, times: Times, load: Load, machine: Machine) -> Iterator[Answer]:
    how = (
        f"simulated: {machine.num_engines} engines x {load.concurrency} clients, "
        + ("device shared equally, " if what == "hit" else "")
        + "each engine computes in turn"
    )
    for key, title, value in (
        ("p50_s", "p50", times.p50_s),
        ("p99_s", "p99", times.p99_s),
        ("burst_p50_s", "p50 of a cold start, all at once", times.burst_p50_s),
        ("burst_worst_s", "slowest of a cold start", times.burst_worst_s),
    ):
        yield _answer(f"{what}_ttft_{key}", f"TTFT, {what}: {title}", value, "s", how)
    yield _answer(
        f"{what}_output_tokens_per_s",
        f"output, {what}",
        times.requests_per_s * load.output_tokens,
        "tokens/s",
        f"{times.requests_per_s:.4g} requests/s x {load.output_tokens} tokens; {how}",
    )


def _answer(key: str, title: str, value: float, unit: str, formula: str) -> Answer:
    return Answer(key=key, title=title, value=value, unit=unit, formula=formula)
