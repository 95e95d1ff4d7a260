"""Break-even bandwidth of well-known models, beside what was worked out for them by hand. Pure.

One GPU of 989 TFLOPS in BF16 at an MFU of one half, all of a prompt held, KV in BF16, no latency:
to be multiplied by the GPUs of a group and by their speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from headstart.sizing.configfile import read_model
from headstart.sizing.prefill import break_even_bytes_per_s

FLOPS = 989e12 * 0.5
LENGTHS = (8192, 32768, 131072)
PRINTED: dict[str, tuple[float, tuple[float, ...], tuple[float, ...]]] = {
    "llama-3.1-8b": (128, (0.30, 1.63, 13.4), (3.56, 2.63, 1.29)),
    "qwen2.5-32b": (256, (1.17, 5.73, 40.0), (1.84, 1.50, 0.86)),
    "llama-3.1-70b": (320, (2.52, 12.2, 83), (1.07, 0.88, 0.52)),
    "llama-3.1-405b": (504, (14.0, 62.6, 358), (0.30, 0.27, 0.19)),
    "qwen3-coder-480b": (248, (1.37, 7.95, 71.5), (1.52, 1.05, 0.47)),
    "deepseek-v3": (68.6, (1.57, 10.3, 106), (0.37, 0.22, 0.09)),
    "gpt-oss-120b": (36, (0.19, 1.0, 7.8), (1.60, 1.21, 0.62)),
    "gpt-oss-20b": (24, (0.13, 0.69, 5.3), (1.52, 1.17, 0.61)),
    "smollm2-135m": (22.5, (0.009, 0.093, 1.27), (20.6, 8.1, 2.4)),
}
"""KiB of KV a token; seconds to compute the three lengths; GB/s. By hand, rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model."""

    name: str
    kv_kib: float
    recompute_s: tuple[float, ...]
    break_even: tuple[float, ...]
    """GB/s."""
    printed: tuple[float, tuple[float, ...], tuple[float, ...]]


def table() -> list[Row]:
    """All models, from their configs."""
    rows = []
    for name, printed in PRINTED.items():
        model = read_model(name)
        seconds = tuple(model.prefill_flops(0, tokens) / FLOPS for tokens in LENGTHS)
        nbytes = float(model.token_nbytes("bfloat16"))
        rates = tuple(
            break_even_bytes_per_s(tokens * nbytes, time) / 1e9
            for tokens, time in zip(LENGTHS, seconds, strict=True)
        )
        rows.append(
            Row(
                name=model.name,
                kv_kib=nbytes / 1024,
                recompute_s=seconds,
                break_even=rates,
                printed=printed,
            )
        )
    return rows
