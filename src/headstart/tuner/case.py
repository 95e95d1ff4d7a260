"""One trace on one machine: what a setting of the cache gives there, in time and in money. Pure.

Where it comes from:

    memory_nbytes, file_nbytes  -> blocks -> what tiers hold (`headstart.tuner.held`)
    config.json, hardware file  -> costs (`headstart.sizing`)
    both                        -> times of first tokens (`headstart.tuner.latency`)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headstart.costs import EngineCosts, ReadCosts
from headstart.errors import ConfigError
from headstart.sizing.architecture import ELEMENT_BITS, Architecture, LayerKind
from headstart.sizing.hardware import Machine
from headstart.sizing.prefill import engine_costs
from headstart.transfer import DEFAULT_INFLIGHT_NBYTES
from headstart.tuner.facts import half
from headstart.tuner.held import Hold, InclusiveTiers
from headstart.tuner.latency import (
    COMPUTED,
    Answered,
    Asked,
    Latency,
    Level,
    Loads,
    Loop,
    Medium,
    Serving,
    replay,
    summarise,
)
from headstart.tuner.recorded import Floats, Recorded
from headstart.tuner.simulate import rates
from headstart.units import format_nbytes

MONTH_S = 30 * 86400.0
MEMORY, FILE = "memory", "file"
MEMORY_WEIGHT = 20
"""Where no prices are given, a byte of memory counts as so many of the storage: an assumption."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A model on a machine, without a load."""

    model: Architecture
    machine: Machine
    costs: EngineCosts
    kv_dtype: str = ""
    """Empty: the model's."""
    level: Level = field(default_factory=Level)
    engine_kv_nbytes: int = 0
    """Of the prefix cache that each engine has itself."""

    def __post_init__(self) -> None:
        if self.kv_dtype and self.kv_dtype not in ELEMENT_BITS:
            allowed = ", ".join(ELEMENT_BITS)
            raise ConfigError(f"KV dtype {self.kv_dtype!r} is unknown; allowed: {allowed}")
        if any(layer.kind is LayerKind.RECURRENT for layer in self.model.layers):
            raise ConfigError(
                f"{self.model.name} has recurrent layers, whose states are no blocks of tokens, so "
                "its hits cannot be timed here; `headstart plan` sizes it"
            )

    def block_nbytes(self, block_size: int) -> int:
        """KV of a block of so many tokens, windows kept whole, over all ranks."""
        dtype = self.kv_dtype or self.model.dtype
        return math.ceil(self.model.token_nbytes(dtype, all_layers=True) * block_size)

    def serving(self, block_size: int, loads: Loads, *, num_tiers: int) -> Serving:
        """Engines with memory, a file tier, or nothing below them."""
        machine, block_nbytes = self.machine, self.block_nbytes(block_size)
        block_s = block_nbytes / machine.read_bytes_per_s + machine.block_s
        reads = ReadCosts(
            fixed_s=machine.latency_s,
            bytes_per_s=block_nbytes / block_s,
            lag_nbytes=DEFAULT_INFLIGHT_NBYTES,
        )
        media = (Medium(name=MEMORY), Medium(name=FILE, reads=reads))
        return Serving(
            costs=self.costs,
            block_size=block_size,
            block_nbytes=block_nbytes,
            media=media[:num_tiers],
            num_engines=machine.num_engines,
            loads=loads,
        )


def make_site(
    model: Architecture,
    machine: Machine,
    *,
    measured: Sequence[tuple[int, float]] = (),
    kv_dtype: str = "",
    level: Level | None = None,
    engine_kv_nbytes: int = 0,
) -> Site:
    """A site with the costs of `headstart.sizing.prefill`. Raises ConfigError.

    `measured`: prompts of so many tokens took so many seconds, computed from their start.
    """
    return Site(
        model=model,
        machine=machine,
        costs=engine_costs(model, machine, measured=measured),
        kv_dtype=kv_dtype,
        level=Level() if level is None else level,
        engine_kv_nbytes=engine_kv_nbytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What can be chosen. No memory: no cache but the engine's own."""

    memory_nbytes: int
    file_nbytes: int
    block_size: int
    policy: str = "lru"
    loads: Loads = Loads.PLANNED

    @property
    def capacities(self) -> tuple[int, ...]:
        """Of its tiers, in bytes."""
        return tuple(each for each in (self.memory_nbytes, self.file_nbytes) if each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What a setting gives, in the last half of the requests."""

    setting: Setting
    latency: Latency
    block_hit: float
    """Share of the blocks that tiers hold, loaded or not."""
    token_hit: float
    slower_share: float
    """Of the requests, whose first token comes later than without a cache."""
    write_bytes_per_s: float
    """That the file tier has to write, if all that is computed is stored."""
    weight: float
    """By which capacities are compared: their price a month, else bytes of storage."""
    cost_month: float | None = None
    """Of the capacities; None: a price is missing."""
    saved_gpu_s_month: float = 0.0
    saved_month: float | None = None
    """Price of those GPU seconds; None: not known."""

    @property
    def pays(self) -> bool:
        """Whether it costs no more than it saves, as far as both are known."""
        known = self.cost_month is not None and self.saved_month is not None
        return not known or (self.cost_month or 0.0) <= (self.saved_month or 0.0)

    @property
    def cost_per_gpu_s(self) -> float | None:
        """Price of a saved GPU second; None: not known, or none is saved."""
        if self.cost_month is None or self.saved_gpu_s_month <= 0.0:
            return None
        return self.cost_month / self.saved_gpu_s_month


class Case:
    """A load at a site. Keeps what settings have in common."""

    def __init__(
        self,
        recorded: Recorded,
        site: Site,
        hold: Hold | None = None,
        *,
        concurrency: int | None = None,
    ) -> None:
        """`concurrency`: requests at once of a closed loop; None: each at its time in the trace."""
        if recorded.input_tokens.max(initial=0) < 1:
            raise ConfigError("a trace whose prompts have no tokens cannot be timed")
        self.recorded, self.site, self.concurrency = recorded, site, concurrency
        self._hold = InclusiveTiers() if hold is None else hold
        self._sizes = {recorded.block_size: recorded}
        self._output_tokens: list[int] = recorded.output_tokens.tolist()
        self._without: dict[int, Answered] = {}

    @property
    def without(self) -> Setting:
        """No cache, but the engine's own."""
        return Setting(memory_nbytes=0, file_nbytes=0, block_size=self.recorded.block_size)

    def longest_nbytes(self, block_size: int) -> int:
        """KV of the longest prompt in blocks of a size."""
        num_blocks = -(-int(self.recorded.input_tokens.max()) // block_size)
        return num_blocks * self.site.block_nbytes(block_size)

    @property
    def num_too_long(self) -> int:
        """Prompts that the model's context does not hold."""
        return int((self.recorded.input_tokens > self.site.model.max_tokens).sum())

    def check(self, setting: Setting) -> None:
        """Raises ConfigError for what cannot be tried."""
        size, own = setting.block_size, self.recorded.block_size
        if size < own or size % own:
            raise ConfigError(
                f"blocks of {size} tokens cannot be told from a trace in blocks of {own}; "
                "a multiple of that can"
            )
        least = self.site.block_nbytes(size)
        for name, nbytes in ((MEMORY, setting.memory_nbytes), (FILE, setting.file_nbytes)):
            if 0 < nbytes < least:
                raise ConfigError(
                    f"a {name} tier of {format_nbytes(nbytes)} does not hold one block of {size} "
                    f"tokens, {format_nbytes(least)}"
                )
        if setting.file_nbytes and not setting.memory_nbytes:
            raise ConfigError("a file tier needs memory above it, through which its blocks pass")

    def replayed(
        self, setting: Setting, advance: Callable[[int], None] = lambda num_requests: None
    ) -> tuple[Serving, Asked, Answered]:
        """Each request with a setting, and what serves it. Raises ConfigError."""
        self.check(setting)
        serving, asked = self._asked(self._in_blocks_of(setting.block_size), setting)
        return serving, asked, replay(asked, serving, advance)

    def time(
        self, setting: Setting, advance: Callable[[int], None] = lambda num_requests: None
    ) -> Timed:
        """What the load gives with a setting. Raises ConfigError."""
        serving, asked, answered = self.replayed(setting, advance)
        recorded = self._in_blocks_of(setting.block_size)
        first = half(recorded)
        latency = summarise(
            asked,
            answered,
            serving,
            first=first,
            output_tokens=self._output_tokens,
            level=self.site.level,
        )
        held = asked.held[-1] if asked.held else np.zeros(len(recorded), np.int64)
        hit = rates(recorded, held, first)
        block_nbytes = serving.block_nbytes
        computed = latency.shares[COMPUTED] * float(recorded.input_tokens[first:].sum())
        written = computed / setting.block_size * block_nbytes if setting.file_nbytes else 0.0
        later_s = answered.ttft_s - self._ttft_without(setting)
        machine, cost = self.site.machine, self._cost_month(setting)
        saved_gpu_s = latency.saved_s * machine.num_gpus * MONTH_S / latency.window_s
        return Timed(
            setting=setting,
            latency=latency,
            block_hit=hit.block_hit,
            token_hit=hit.token_hit,
            slower_share=float((later_s[first:] > 1e-3).mean()),
            write_bytes_per_s=written / latency.window_s,
            weight=setting.memory_nbytes * MEMORY_WEIGHT + setting.file_nbytes
            if cost is None
            else cost,
            cost_month=cost,
            saved_gpu_s_month=saved_gpu_s,
            saved_month=saved_gpu_s * machine.gpu_hour / 3600 if machine.gpu_hour else None,
        )

    def _in_blocks_of(self, block_size: int) -> Recorded:
        if block_size not in self._sizes:
            factor = block_size // self.recorded.block_size
            self._sizes[block_size] = self.recorded.coarser(factor)
        return self._sizes[block_size]

    def _asked(self, recorded: Recorded, setting: Setting) -> tuple[Serving, Asked]:
        site, size = self.site, setting.block_size
        serving = site.serving(size, setting.loads, num_tiers=len(setting.capacities))
        num_blocks = [nbytes // serving.block_nbytes for nbytes in setting.capacities]
        # As if a prompt always went to the engine that has its prefix: good for what is compared.
        own = site.engine_kv_nbytes * site.machine.num_engines // serving.block_nbytes
        own_blocks = self._hold(recorded, "lru", [own])[0]
        loop = None
        if self.concurrency is not None:
            later = np.maximum(recorded.output_tokens - 1, 0)
            loop = Loop(concurrency=self.concurrency, answer_s=later * site.level.tpot_s)
        asked = Asked(
            at_s=recorded.at_s,
            num_tokens=recorded.input_tokens,
            own_blocks=own_blocks,
            held=tuple(self._hold(recorded, setting.policy, num_blocks)),
            loop=loop,
        )
        return serving, asked

    def _ttft_without(self, setting: Setting) -> Floats:
        """Of the same blocks: the engine's own cache has them, too."""
        size = setting.block_size
        if size not in self._without:
            recorded = self._in_blocks_of(size)
            none = Setting(memory_nbytes=0, file_nbytes=0, block_size=size)
            serving, asked = self._asked(recorded, none)
            self._without[size] = replay(asked, serving)
        return self._without[size].ttft_s

    def _cost_month(self, setting: Setting) -> float | None:
        machine = self.site.machine
        memory, storage = machine.memory_gib_month, machine.storage_gib_month
        if not memory or not (storage or machine.storage_month):
            return None
        cost = setting.memory_nbytes / _GIB * memory
        if setting.file_nbytes:
            cost += setting.file_nbytes / _GIB * storage + machine.storage_month
        return cost
