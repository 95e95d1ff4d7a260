"""The KV cache of one request, as one tensor that blocks are copied into and out of.

A `DynamicCache` grows by concatenation: every step copies the whole prefix, and so would every
block that is put into it. A `KvRoom` is allocated once, at its final size, and its layers hand the
model views of what is filled so far:

    tensor   (layer, kv, head, token, dim)     kv: 0 = keys, 1 = values
    block i  tensor[:, :, :, i * block_size : (i + 1) * block_size]

which makes a block one strided copy for all layers, in both directions.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicLayer

from headstart.keys import BlockLayout

AXES = "layer kv head token dim"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What the KV of one token looks like in a model."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def dtype_name(self) -> str:
        """The dtype as block layouts spell it, for example "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    def block_layout(self, block_size: int) -> BlockLayout:
        """The layout of a block of `block_size` tokens. Raises ConfigError for an unknown dtype."""
        return BlockLayout(
            block_size=block_size,
            axes=AXES,
            shape=(self.num_layers, 2, self.num_heads, block_size, self.head_dim),
            dtype=self.dtype_name,
        )


class KvRoom:
    """Room for the KV of `num_tokens` tokens of one request."""

    def __init__(self, shape: KvShape, num_tokens: int) -> None:
        """Allocates without touching: a token's memory is undefined until it is filled."""
        self._tensor = torch.empty(
            (shape.num_layers, 2, shape.num_heads, num_tokens, shape.head_dim),
            dtype=shape.dtype,
            device=shape.device,
        )

    def cache(self, num_tokens: int) -> Cache:
        """The first `num_tokens` tokens as a cache for the model, which fills the rest in place."""
        return Cache(layers=[_RoomLayer(keys, values, num_tokens) for keys, values in self._tensor])

    def fill(self, views: Sequence[memoryview], block_size: int) -> None:
        """Copy blocks in, from token 0. Returns when the views are no longer needed."""
        for index, block in enumerate(_tensors(views, self._tensor.dtype)):
            tokens = self._block(index, block_size)
            tokens.copy_(block.to(self._tensor.device).view(tokens.shape))

    def drain(self, views: Sequence[memoryview], block_size: int, first: int) -> None:
        """Copy blocks out: block `first` into `views[0]`, and so on. Returns when that is done."""
        for index, block in enumerate(_tensors(views, self._tensor.dtype), start=first):
            tokens = self._block(index, block_size)
            block.view(tokens.shape).copy_(tokens)

    def _block(self, index: int, block_size: int) -> torch.Tensor:
        return self._tensor[:, :, :, index * block_size : (index + 1) * block_size]


class _RoomLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """One layer's keys and values: views of a room, growing into it."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, num_tokens: int) -> None:
        """`keys` and `values`: (head, token, dim), the whole room."""
        super().__init__()
        self._room = (keys[None], values[None])
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self._show(num_tokens)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `(1, head, new tokens, dim)` in place; returns all keys and values so far."""
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            assert stop <= room.shape[-2], "the room was made for fewer tokens"
            room[:, :, start:stop] = states
        self._show(stop)
        return self.keys, self.values

    def _show(self, num_tokens: int) -> None:
        self.keys, self.values = (room[:, :, :num_tokens] for room in self._room)


def _tensors(views: Sequence[memoryview], dtype: torch.dtype) -> list[torch.Tensor]:
    """Flat tensors over the memory of `views`."""
    with warnings.catch_warnings():
        # Leased memory is read-only, and stays so: nothing below writes to it.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return [torch.frombuffer(view, dtype=dtype) for view in views]
