"""How long prefills and copies take, as the cost models of `headstart.costs`. Pure.

    prefill  t(p, s) = steps*step_s + token_s*s + pair_s*(p*s + s*s/2)
    copy     bytes / (links of the engine's GPUs, as far as they share the bytes)
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
from headstart.sizing.hardware import Machine, with_split

MAX_STEP_TOKENS = 8192
"""Of one step, as engines have it for servers of today."""
_MAX_STEP_TOKENS = 10**9
_STEP_S = 5e-3
"""Of a step, besides its work: launches and scheduling."""


def engine_costs(
    model: Architecture,
    machine: Machine,
    *,
    measured: Sequence[tuple[int, float]] = (),
    step_s: float | None = None,
    max_step_tokens: int = MAX_STEP_TOKENS,
) -> EngineCosts:
    """What one engine takes to compute and to copy. Raises ConfigError.

    `measured`: prompts of so many tokens took so many seconds, computed from their start. `step_s`:
    of a step, besides its work; None: 5 ms, or nothing where prefills were measured.
    """
    if step_s is None:
        step_s = 0.0 if measured else _STEP_S
    if not 0.0 <= step_s < math.inf or not 1 <= max_step_tokens <= _MAX_STEP_TOKENS:
        raise ConfigError(
            f"steps of {step_s:g} s and {max_step_tokens} tokens: they last 0 s or more besides "
            f"their work, and compute at least 1 token, at most {_MAX_STEP_TOKENS:.0e}"
        )
    token_s, pair_s = _by_peak(model, machine)
    if measured:
        for tokens, _ in measured:
            if tokens > 0:
                model.check_tokens(tokens)
        work = [
            (tokens, seconds, seconds - step_s * -(-tokens // max_step_tokens))
            for tokens, seconds in measured
        ]
        token_s, pair_s = _fitted(token_s, pair_s, work)
    return EngineCosts(
        step_s=step_s,
        token_s=token_s,
        pair_s=pair_s,
        uncertainty=0.0,
        max_step_tokens=max_step_tokens,
        copy_bytes_per_s=with_split(machine, model.split(machine.num_gpus)).link.bytes_per_s,
    )


def token_formula(model: Architecture, machine: Machine, costs: EngineCosts) -> str:
    """How seconds a token and a pair of these costs came about."""
    if (costs.token_s, costs.pair_s) != _by_peak(model, machine):
        return "seconds a token and a pair fitted to measured prefills"
    gpu, dtype = machine.gpu, model.weights_dtype
    share = f"{machine.mfu:g} of it x {machine.num_gpus} GPUs"
    windows = f" + {model.window_flops():.4g} in windows" if model.window_flops() else ""
    return (
        f"a token: (2 x {model.active_parameters:.4g} parameters, {model.parameters_from}{windows})"
        f" FLOPs / ({gpu.peak(dtype):.4g} FLOPS in {gpu.units(dtype)} x {share}); a pair: "
        f"{model.pair_flops():.4g} FLOPs / ({gpu.peak('bf16'):.4g} FLOPS in bf16 x {share})"
    )


def _by_peak(model: Architecture, machine: Machine) -> tuple[float, float]:
    """Seconds a token and a pair, by FLOPs."""
    share = machine.mfu * machine.num_gpus
    token_s = model.token_flops() / (machine.gpu.peak(model.weights_dtype) * share)
    return token_s, model.pair_flops() / (machine.gpu.peak("bf16") * share)


def _fitted(
    token_s: float, pair_s: float, measured: Sequence[tuple[int, float, float]]
) -> tuple[float, float]:
    """By prompts that took so long, so much of it for their tokens."""
    for tokens, seconds, work_s in measured:
        if tokens <= 0 or not 0.0 < work_s <= seconds < math.inf:
            raise ConfigError(
                f"a prefill of {tokens} tokens in {seconds:g} s cannot be, or not with such steps; "
                "write --prefill 1024=0.21,8192=1.9"
            )
    sizes = (512, 4096, 32768)
    fit = LinearFit((token_s, pair_s), [(n, num_pairs(0, n)) for n in sizes])
    for tokens, seconds, work_s in measured:
        if not fit.observe((tokens, num_pairs(0, tokens)), work_s):
            raise ConfigError(f"a prefill of {tokens} tokens in {seconds:g} s: seconds, not less")
    token, pair = fit.coefficients
    return float(token), float(pair)


def break_even_bytes_per_s(nbytes: float, saved_s: float, fixed_s: float = 0.0) -> float:
    """Bandwidth above which a load of so many bytes takes less than it saves; infinite: none."""
    left = saved_s - fixed_s
    return nbytes / left if left > 0 else math.inf
