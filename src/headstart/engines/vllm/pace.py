"""How fast this engine computes and copies, learnt from its own steps.

A step's time is that from its being scheduled, or from the end of the one before if steps overlap,
to the arrival of its output, without what was copied in it. Steps are numbered, since not every
step comes back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headstart.costs import EngineCosts, EngineModel, num_pairs
from headstart.engines.vllm.step import WorkerMeta
from headstart.node.protocol import Costs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MAX_STEPS = 64
_FLOPS_PER_CORE = 1.5e11
"""Of a server's core in float32 or bfloat16; an engine on a CPU is hardly ever faster."""
_FLOPS_PER_DEVICE = 1e15
_COPY_BYTES_PER_S = 4e9
_PRIOR_UNCERTAINTY = 0.5
_SAVED_UNCERTAINTY = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    started: float
    tokens: int
    pairs: float
    is_prefill: bool


class Pace:
    """See the module. For the scheduler's thread; times by its clock, in seconds."""

    def __init__(self, prior: EngineCosts) -> None:
        self._prior, self._model = prior, EngineModel(prior)
        self._steps: dict[int, _Step] = {}
        self._ended_at = float("-inf")
        self._number = 0
        self.busy_s = 0.0
        """Time spent so far in steps that computed prompts."""

    @property
    def costs(self) -> EngineCosts:
        """What is known now."""
        return self._model.costs

    @property
    def num_steps(self) -> int:
        """Steps that were learnt from."""
        return self._model.num_observed

    def step_s(self, tokens: int) -> float:
        """How long a step of so many tokens, of prompts from their start, will take."""
        return self.costs.step_s + self.costs.work_s(tokens, num_pairs(0, tokens))

    def begin_with(self, saved: Costs | None) -> None:
        """What an earlier engine has learnt, if nothing is known of this one yet."""
        if saved is not None and not self.num_steps:
            self._model = EngineModel(saved_costs(self._prior, saved))

    def begin(
        self, work: Mapping[str, tuple[int, int]], now: float, *, is_prefill: bool = True
    ) -> int:
        """A step was scheduled: (cached, new) tokens of each request; its number.

        Without work nothing is learnt from it but copies. `is_prefill`: it computes prompts.
        """
        self._number += 1
        self._steps[self._number] = _Step(
            started=now,
            tokens=sum(new for _, new in work.values()),
            pairs=sum(num_pairs(cached, new) for cached, new in work.values()),
            is_prefill=is_prefill,
        )
        if len(self._steps) > _MAX_STEPS:
            del self._steps[next(iter(self._steps))]
        return self._number

    def end(self, told: WorkerMeta, now: float) -> None:
        """The output of a step came."""
        step = self._steps.pop(told.number, None)
        if step is None:
            return
        seconds = now - max(step.started, self._ended_at)
        self.busy_s += seconds * step.is_prefill
        self._ended_at = now
        compute_s = seconds - told.load_copy_s - told.store_copy_s
        if step.tokens:
            self._model.step(step.tokens, step.pairs, compute_s)
        if told.loaded_nbytes:
            self._model.copy(told.loaded_nbytes, told.load_copy_s)


def prior_costs(vllm_config: VllmConfig) -> EngineCosts:
    """Costs before any step was seen: by FLOPs (see `headstart.costs`), on the fast side.

    Fast is safe: the faster computing seems, the less a request waits for a read.
    """
    config: Any = vllm_config.model_config.hf_text_config
    layers, hidden = int(config.num_hidden_layers), int(config.hidden_size)
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    heads = int(config.num_attention_heads)
    head = int(getattr(config, "head_dim", None) or hidden // heads)
    parameters = layers * (4 * hidden * heads * head + 3 * hidden * inner)
    world_size = vllm_config.parallel_config.world_size
    if vllm_config.device_config.device_type == "cpu":
        flops = _FLOPS_PER_CORE * (os.cpu_count() or 1)
    else:
        flops = _FLOPS_PER_DEVICE * world_size
    return EngineCosts(
        step_s=1e-3,
        token_s=2 * parameters / flops,
        pair_s=4 * layers * heads * head / flops,
        uncertainty=_PRIOR_UNCERTAINTY,
        max_step_tokens=int(vllm_config.scheduler_config.max_num_batched_tokens),
        copy_bytes_per_s=_COPY_BYTES_PER_S * world_size,
    )


def saved_costs(prior: EngineCosts, saved: Costs) -> EngineCosts:
    """What an earlier engine learnt, as a prior of this one."""
    return EngineCosts(
        step_s=saved.step_s,
        token_s=saved.token_s,
        pair_s=saved.pair_s,
        uncertainty=min(_PRIOR_UNCERTAINTY, saved.uncertainty + _SAVED_UNCERTAINTY),
        max_step_tokens=prior.max_step_tokens,
        copy_bytes_per_s=saved.copy_bytes_per_s,
    )
