"""What the demo found: answers, phases, the whole; and its JSON, `headstart.demo/1`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = "headstart.demo/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of one phase. Times in seconds, as `engines.transformers.Generation` has them."""

    kind: str
    """"question" or "chat"."""
    question: str
    text: str
    tokens: tuple[int, ...]
    top2_gaps: tuple[float, ...]
    prompt_tokens: int
    hit_tokens: int
    tokens_from: dict[str, int]
    loaded_nbytes: int
    stored_nbytes: int
    lookup_s: float
    load_s: float
    prefill_s: float
    decode_s: float
    store_s: float
    ttft_s: float
    total_s: float

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Answer:
        """The answer whose `asdict` went through JSON."""
        fields = dict(mapping)
        for name in ("tokens", "top2_gaps"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReads:
    """Bytes that came from the device while question 1 was answered; None: not counted here."""

    process_nbytes: int | None
    """What the kernel read for this process, page cache hits left out."""
    device_nbytes: int | None
    """What the block device read for anybody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """All answers of one way to run; its figures are those of question 1."""

    name: str
    """"recompute", "cold", "memory" or "restart"."""
    answers: tuple[Answer, ...]
    differences: tuple[int, ...]
    """Indices of the answers that are not the same as in the recompute phase."""
    seconds: float
    """The whole phase, with everything between the answers."""
    startup_s: float = 0.0
    """Before the first question: starting Python, importing torch, loading the model."""
    device: DeviceReads | None = None

    @property
    def first(self) -> Answer:
        """The answer to question 1."""
        return self.answers[0]

    @property
    def identical(self) -> bool:
        """Whether every answer is the same as in the recompute phase."""
        return not self.differences

    @property
    def load_bytes_per_s(self) -> float | None:
        """Bandwidth of question 1's load; None when nothing was loaded."""
        return self.first.loaded_nbytes / self.first.load_s if self.first.loaded_nbytes else None

    def to_json(self) -> dict[str, object]:
        """The phase as it stands in the JSON: figures of question 1, then every answer."""
        answers = [
            {**asdict(answer), "same_as_recompute": index not in self.differences}
            for index, answer in enumerate(self.answers)
        ]
        figures = {
            name: getattr(self.first, name)
            for name in (
                *("ttft_s", "prompt_tokens", "hit_tokens", "tokens_from", "lookup_s", "load_s"),
                *("prefill_s", "store_s", "loaded_nbytes", "stored_nbytes"),
            )
        }
        return {
            "name": self.name,
            **figures,
            "load_bytes_per_s": self.load_bytes_per_s,
            "identical": self.identical,
            "startup_s": self.startup_s,
            "seconds": self.seconds,
            "device": None if self.device is None else asdict(self.device),
            "answers": answers,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The whole demonstration."""

    model: str
    dtype: str
    block_size: int
    block_nbytes: int
    machine: dict[str, str]
    """Facts about the machine for people, by title; no names of hosts or places."""
    phases: tuple[Phase, ...]
    """recompute, cold, memory, restart."""
    seconds: float

    def phase(self, name: str) -> Phase:
        """The phase of that name."""
        return next(phase for phase in self.phases if phase.name == name)

    @property
    def identical(self) -> bool:
        """Whether no answer of any phase differs from the recomputed one."""
        return all(phase.identical for phase in self.phases)

    @property
    def speedup_restart(self) -> float:
        """How many times faster question 1's first token comes in a new process, over recompute."""
        return self.phase("recompute").first.ttft_s / self.phase("restart").first.ttft_s

    @property
    def device_verified(self) -> bool:
        """Whether question 1's blocks came from the device in the new process, by its counters.

        False also where the system counts nothing, or `root` is no disk.
        """
        restart = self.phase("restart")
        counted = restart.device.process_nbytes if restart.device else None
        wanted = restart.first.loaded_nbytes
        return counted is not None and wanted > 0 and counted >= wanted

    def to_json(self) -> dict[str, object]:
        """The document `headstart.demo/1`."""
        return {
            "schema": SCHEMA,
            "identical": self.identical,
            "phases": [phase.to_json() for phase in self.phases],
            "speedup_restart": self.speedup_restart,
            "device_verified": self.device_verified,
            "model": self.model,
            "dtype": self.dtype,
            "block_size": self.block_size,
            "block_nbytes": self.block_nbytes,
            "machine": self.machine,
            "seconds": self.seconds,
        }

    def dumps(self) -> str:
        """The document as text."""
        return json.dumps(self.to_json(), indent=1) + "\n"
