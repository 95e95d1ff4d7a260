"""What hits need of a machine for a model and a load, and what they give: the numbers. Pure.

n: tokens of a prompt; h: its held share; T: prefill time of `headstart.sizing.prefill`; V: bytes of
the hit; B: bandwidth of the storage; L: of the links to an engine's GPUs; m: share of the hits that
host memory holds.

    from storage   latency + V / B + V / L + T(h n, n)       read, copied, the rest computed
    from memory                     V / L + T(h n, n)
    recomputed                              T(0, n)

Reading and copying are one after the other, as where an engine copies verified blocks in a step of
its own; it was checked against hits on disks throttled to known rates (tests/sizing).
"""

from __future__ import annotations

from dataclasses import dataclass

from headstart.costs import EngineCosts, ReadCosts
from headstart.errors import ConfigError
from headstart.sizing.architecture import Architecture
from headstart.sizing.contexts import mean_tokens
from headstart.sizing.hardware import Machine, with_split
from headstart.sizing.load import Load
from headstart.sizing.prefill import break_even_bytes_per_s
from headstart.sizing.queueing import Times, Work, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """So many prompts that come at once, all held: the last of them, read from the storage."""

    tokens: int
    concurrency: int
    load_s: float
    memory_s: float
    """Of one that host memory holds, alone."""
    recompute_s: float

    @property
    def ratio(self) -> float:
        """Below 1: the hit comes first."""
        return self.load_s / self.recompute_s


class Sizing:
    """Times and bandwidths for one model, machine and load. Raises ConfigError."""

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
        if not self.nbytes(self.mean):
            raise ConfigError(
                f"of a mean prompt of {self.mean} tokens, {self.held(self.mean)} are held and have "
                "no KV to load; ask for longer prompts (--context) or a larger share (--hit-share)"
            )

    def held(self, tokens: int) -> int:
        """Tokens of a prompt that are loaded: never the last one."""
        return min(tokens - 1, int(self.load.hit_share * tokens))

    def nbytes(self, tokens: int) -> int:
        """Bytes of its hit."""
        return self.model.prompt_nbytes(self.held(tokens), self.dtype)

    def rest_s(self, tokens: int) -> float:
        """Seconds to compute what is not held."""
        return self.costs.prefill_s(self.held(tokens), tokens)

    def saved_s(self, tokens: int) -> float:
        """Seconds of computing that the hit spares."""
        return self.costs.prefill_s(0, tokens) - self.rest_s(tokens)

    def break_even(self, tokens: int) -> float:
        """Bytes/s that one engine's reads must come at; infinite: none is enough."""
        nbytes = self.nbytes(tokens)
        fixed_s = self.machine.latency_s + self.costs.copy_s(nbytes)
        return break_even_bytes_per_s(nbytes, self.saved_s(tokens), fixed_s)

    def memory_hit_s(self, tokens: int) -> float:
        """To the first token of a hit in host memory, alone."""
        return self.costs.copy_s(self.nbytes(tokens)) + self.rest_s(tokens)

    def cell(self, tokens: int, count: int) -> Cell:
        """The last of `count` prompts of each engine that come at once, against computing."""
        nbytes = self.nbytes(tokens)
        from_storage = 1.0 - self.load.memory_share
        ahead = round(from_storage * (count * self.machine.num_engines - 1) * nbytes)
        reads = ReadCosts(
            fixed_s=self.machine.latency_s,
            bytes_per_s=self.machine.read_bytes_per_s,
            ahead_nbytes=ahead,
        )
        return Cell(
            tokens=tokens,
            concurrency=count,
            load_s=reads.read_s(nbytes) + self.memory_hit_s(tokens),
            memory_s=self.memory_hit_s(tokens),
            recompute_s=self.costs.prefill_s(0, tokens),
        )

    def flip(self, tokens: int) -> int:
        """Prompts at once, of an engine, up to which the last read beats computing."""
        memory = self.load.memory_share
        most = self.machine.read_bytes_per_s / self.break_even(tokens)
        return max(0, int((most - memory) / (1.0 - memory) / self.machine.num_engines))

    def engines_fed(self) -> int:
        """So many can load a mean prompt at once, and each still beats computing."""
        most = self.machine.read_bytes_per_s / self.break_even(self.mean)
        return int(most / (1.0 - self.load.memory_share))

    def simulated(self, *, hits: bool) -> Times:
        """Under queueing: all clients of all engines."""
        return simulate(
            self._works(hits=hits),
            costs=self.costs,
            tpot_s=self.load.tpot_s,
            clients=self.load.concurrency,
            engines=self.machine.num_engines,
            bytes_per_s=self.machine.read_bytes_per_s,
        )

    def _works(self, *, hits: bool) -> list[Work]:
        works = []
        for tokens, share in self.load.contexts:
            if not hits:
                works.append(
                    Work(share=share, tokens=tokens, output_tokens=self.load.output_tokens)
                )
                continue
            nbytes, memory = self.nbytes(tokens), self.load.memory_share
            for part, is_read in ((share * memory, False), (share * (1.0 - memory), True)):
                works.append(
                    Work(
                        share=part,
                        tokens=tokens,
                        held_tokens=self.held(tokens),
                        fixed_s=self.machine.latency_s if is_read else 0.0,
                        read_nbytes=nbytes if is_read else 0,
                        copy_nbytes=nbytes,
                        output_tokens=self.load.output_tokens,
                    )
                )
        return works
