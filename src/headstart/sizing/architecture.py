"""What a model's architecture says about its KV cache and about the work of a prefill. Pure.

    attention (GQA, MHA)  2 * kv_heads * head_dim     elements a token and layer
    latent (MLA)          kv_lora_rank + rope_dim     elements a token and layer, no factor 2
    window of w tokens    as attention, but of the last w - 1 tokens: the next token is the w-th
    recurrent             a fixed state, whatever the length

MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1.4. FLOPs: Kaplan et al. 2020, section 2.1, with
causal attention, as in `headstart.costs`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from headstart.errors import ConfigError

ELEMENT_BITS = {
    "float32": Fraction(32),
    "bfloat16": Fraction(16),
    "float16": Fraction(16),
    "fp8": Fraction(8),
    # Blocks of 16 values share a scale of 8 bits, as NVFP4 has them.
    "fp4": Fraction(4) + Fraction(8, 16),
}
"""Bits of one element of KV, its share of the scales included."""


class LayerKind(enum.StrEnum):
    """How a layer remembers what came before."""

    ATTENTION = "attention"
    LATENT = "latent"
    WINDOW = "window"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Layers of one kind and size."""

    kind: LayerKind
    count: int
    elements: int = 0
    """Of KV, a token and layer."""
    heads: int = 0
    """Query heads."""
    kv_heads: int = 0
    """Over which the KV can be split; 0: it cannot."""
    head_dim: int = 0
    """Mean of the sizes that queries are multiplied with keys and weights with values in."""
    window: int = 0
    state_nbytes: int = 0
    """Of one sequence, a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model, as far as its KV cache and its prefill depend on it."""

    name: str
    layers: tuple[Layer, ...]
    active_parameters: int
    """That one token is multiplied with."""
    parameters_from: str
    """How they were found."""
    max_tokens: int
    dtype: str
    weights_dtype: str
    source: str = ""
    """Where its figures are from; empty: a file that was given."""

    def __post_init__(self) -> None:
        if self.active_parameters <= 0 or self.max_tokens <= 0 or not self.layers:
            raise ConfigError(f"model {self.name}: it must have layers, parameters and a context")

    def check_tokens(self, num_tokens: int) -> None:
        """Raises ConfigError for a context that the model does not have."""
        if not 0 < num_tokens <= self.max_tokens:
            raise ConfigError(
                f"a context of {num_tokens} tokens: {self.name} has at most {self.max_tokens} "
                "(max_position_embeddings); ask for less, or give a config.json with the longer one"
            )

    def elements(self, *, all_layers: bool = False) -> int:
        """Elements of KV that each further token adds, past all windows.

        `all_layers`: as a cache counts them that keeps the KV of every token in windows, too.
        """
        return sum(
            layer.elements * layer.count
            for layer in self.layers
            if all_layers or layer.kind is not LayerKind.WINDOW
        )

    def token_nbytes(self, dtype: str, *, all_layers: bool = False) -> Fraction:
        """Bytes of KV that each further token adds, past all windows, over all ranks."""
        return self.elements(all_layers=all_layers) * ELEMENT_BITS[dtype] / 8

    def prompt_nbytes(self, num_tokens: int, dtype: str) -> int:
        """Bytes that have to be loaded to go on after so many tokens: KV, windows and states."""
        elements = states = 0
        for layer in self.layers:
            kept = num_tokens
            if layer.kind is LayerKind.WINDOW:
                kept = min(num_tokens, layer.window - 1)
            elements += layer.elements * layer.count * kept
            states += layer.state_nbytes * layer.count if num_tokens else 0
        bits = elements * ELEMENT_BITS[dtype]
        return -int(-bits // 8) + states

    def rank_token_nbytes(self, dtype: str, num_ranks: int) -> Fraction:
        """Bytes a token on one of so many tensor-parallel ranks.

        KV heads are split as far as there are any; latent KV is on every rank in full.
        """
        elements = sum(
            (
                _rank_elements(layer, num_ranks)
                for layer in self.layers
                if layer.kind is not LayerKind.WINDOW
            ),
            start=Fraction(0),
        )
        return elements * ELEMENT_BITS[dtype] / 8

    def split(self, num_ranks: int) -> float:
        """In how many parts the KV is on so many ranks: what each of them has to load."""
        rank = sum(_rank_elements(layer, num_ranks) for layer in self.layers)
        return float(self.elements(all_layers=True) / rank) if rank else float(num_ranks)

    def pair_flops(self) -> int:
        """FLOPs of one token that attends to one before it, in all layers without a window."""
        return sum(4 * layer.count * layer.heads * layer.head_dim for layer in self._unbounded())

    def window_flops(self) -> int:
        """FLOPs that windows add to each token, once they are full."""
        return sum(
            4 * layer.count * layer.heads * layer.head_dim * layer.window
            for layer in self.layers
            if layer.kind is LayerKind.WINDOW
        )

    def token_flops(self) -> int:
        """FLOPs of one token, its attention to others without a window not counted."""
        return 2 * self.active_parameters + self.window_flops()

    def prefill_flops(self, num_cached: int, num_new: int) -> float:
        """FLOPs to compute `num_new` tokens after `num_cached`."""
        pairs = num_cached * num_new + num_new * num_new / 2
        return self.token_flops() * num_new + self.pair_flops() * pairs

    def _unbounded(self) -> Iterator[Layer]:
        return (
            layer for layer in self.layers if layer.kind in (LayerKind.ATTENTION, LayerKind.LATENT)
        )


def _rank_elements(layer: Layer, num_ranks: int) -> Fraction:
    return Fraction(layer.elements * layer.count, min(num_ranks, max(1, layer.kv_heads)))
