"""How long prefills and loads take, as the cost models of `headstart.costs`. Pure.

    prefill  t(p, s) = steps*step_s + token_s*s + pair_s*(p*s + s*s/2)
    token_s  = token FLOPs / (peak of the weights' dtype * MFU * GPUs)
    pair_s   = attention FLOPs of a pair / (peak of BF16 * MFU * GPUs)

or, where prefills were measured, the fit to those, with the same ratio as prior.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headstart.costs import EngineCosts, LinearFit, num_pairs
from headstart.errors import ConfigError
from headstart.sizing.architecture import Architecture
from headstart.sizing.hardware import Machine

MAX_STEP_TOKENS = 8192
"""Of one step, as engines have it for servers of today."""
_STEP_S = 5e-3
"""Of a step, besides its work: launches and scheduling."""


def engine_costs(
    model: Architecture,
    machine: Machine,
    *,
    compute: str = "",
    measured: Sequence[tuple[int, float]] = (),
    step_s: float = _STEP_S,
) -> EngineCosts:
    """What one engine takes to compute. `compute`: dtype of the peak, else the weights' own.

    `measured`: prompts of so many tokens took so many seconds, computed from their start.
    """
    share = machine.mfu * machine.num_gpus
    token_s = model.token_flops() / (machine.gpu.peak(compute or model.weights_dtype) * share)
    pair_s = model.pair_flops() / (machine.gpu.peak("bf16") * share)
    if measured:
        token_s, pair_s = _fitted(token_s, pair_s, measured)
        step_s = 0.0
    link = machine.stages[-1].bytes_per_s / machine.num_engines
    return EngineCosts(
        step_s=step_s,
        token_s=token_s,
        pair_s=pair_s,
        uncertainty=0.0,
        max_step_tokens=MAX_STEP_TOKENS,
        copy_bytes_per_s=link,
    )


def _fitted(
    token_s: float, pair_s: float, measured: Sequence[tuple[int, float]]
) -> tuple[float, float]:
    for tokens, seconds in measured:
        if tokens <= 0 or not 0.0 < seconds < math.inf:
            raise ConfigError(
                f"a prefill of {tokens} tokens in {seconds:g} s cannot be; write --prefill "
                "1024=0.21,8192=1.9"
            )
    sizes = (512, 4096, 32768)
    fit = LinearFit((token_s, pair_s), [(n, num_pairs(0, n)) for n in sizes])
    for tokens, seconds in measured:
        fit.observe((tokens, num_pairs(0, tokens)), seconds)
    token, pair = fit.coefficients
    return float(token), float(pair)


def break_even_bytes_per_s(nbytes: float, saved_s: float, fixed_s: float = 0.0) -> float:
    """Bandwidth above which a load of so many bytes takes less than it saves; infinite: none."""
    left = saved_s - fixed_s
    return nbytes / left if left > 0 else math.inf
