"""Copies of whole blocks between an engine's KV cache and the arena, in plain torch.

A block's bytes are opaque: the page of each layer, one after the other, in the order of the layers.
So nothing here depends on how an attention kernel packs keys and values. The copies run on the
current stream, which is synchronised before a call returns: the same code is right for CPU and for
CUDA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import torch

from headstart.errors import UnsupportedModelError
from headstart.units import PAGE_NBYTES, align_up

Blocks = Sequence[tuple[int, int]]
"""(block id in the KV cache, byte offset in the arena) of each block."""

_MADV_HUGEPAGE = 14  # mman.h
_MADV_POPULATE_WRITE = 23  # mman.h, Linux 5.14


class Copier(Protocol):
    """Moves blocks. Raises RuntimeError when a copy fails."""

    @property
    def shard_nbytes(self) -> int:
        """Bytes of one block on this rank."""

    def load(self, blocks: Blocks, arena: torch.Tensor) -> None:
        """Copy from the arena, a flat uint8 tensor in host memory, into the KV cache."""

    def store(self, blocks: Blocks, arena: torch.Tensor) -> None:
        """Copy from the KV cache into the arena."""


class TorchCopier:
    """A `Copier` for any device: one strided copy a block where the layers lie evenly."""

    def __init__(
        self,
        caches: Mapping[str, torch.Tensor],
        layer_pages: Sequence[tuple[str, int]],
        num_blocks: int,
    ) -> None:
        """`caches`: each layer's KV cache, whose first dimension counts blocks.

        `layer_pages`: the layers in the order in which a block has them, and the bytes of each.
        Raises UnsupportedModelError when a layer's block is not one contiguous piece of memory.
        """
        self._pages = [
            _pages(name, caches[name], nbytes, num_blocks) for name, nbytes in layer_pages
        ]
        self._even = _even(self._pages)
        """(layer, block, byte) of the whole cache, or None."""
        self._nbytes = [pages.shape[1] for pages in self._pages]
        self._is_cuda = any(pages.is_cuda for pages in self._pages)

    @property
    def shard_nbytes(self) -> int:
        """See `Copier.shard_nbytes`."""
        return sum(self._nbytes)

    def load(self, blocks: Blocks, arena: torch.Tensor) -> None:
        """See `Copier.load`."""
        for block, offset in blocks:
            for cache, stored in self._pairs(block, arena[offset : offset + self.shard_nbytes]):
                cache.copy_(stored)
        self._synchronise()

    def store(self, blocks: Blocks, arena: torch.Tensor) -> None:
        """See `Copier.store`."""
        for block, offset in blocks:
            for cache, stored in self._pairs(block, arena[offset : offset + self.shard_nbytes]):
                stored.copy_(cache)
        self._synchronise()

    def _pairs(self, block: int, stored: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of a block in the cache, and of the same bytes in its slot."""
        if self._even is not None:
            cache = self._even[:, block]
            return [(cache, stored.view(cache.shape))]
        pieces = torch.split(stored, self._nbytes)
        return [(pages[block], piece) for pages, piece in zip(self._pages, pieces, strict=True)]

    def _synchronise(self) -> None:
        if self._is_cuda:
            torch.cuda.current_stream().synchronize()


def touch(caches: Mapping[str, torch.Tensor]) -> None:
    """Have the kernel find all memory of a KV cache in host memory now, in huge pages if it can.

    Else the first load into each page pays for it, in the time to a first token. Contents stay.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    storages = {cache.untyped_storage().data_ptr(): cache for cache in caches.values()}
    for address, cache in storages.items():
        if cache.device.type == "cpu":
            start = align_up(address)
            stop = address + cache.untyped_storage().nbytes()
            length = (stop - start) // PAGE_NBYTES * PAGE_NBYTES
            for advice in (_MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)


def _pages(name: str, cache: torch.Tensor, page_nbytes: int, num_blocks: int) -> torch.Tensor:
    """The bytes of one layer's cache as (block, byte), a view; padding counts as a page's."""
    count, itemsize = cache.shape[0], cache.element_size()
    ratio = count // num_blocks
    stride = cache.stride(0) * itemsize
    shape_and_steps = zip(cache.shape[1:], cache.stride()[1:], strict=True)
    span = (1 + sum((n - 1) * step for n, step in shape_and_steps)) * itemsize
    # Some backends cut a block into several of their own: they must lie side by side.
    whole = ratio * num_blocks == count and (ratio == 1 or stride == span)
    compact = span == cache[0].numel() * itemsize and ratio * span <= page_nbytes <= ratio * stride
    if not whole or not compact:
        raise UnsupportedModelError(
            f"the KV cache of layer {name} does not keep a block in one piece; "
            "set VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    flat = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    return flat.as_strided(
        (num_blocks, page_nbytes), (ratio * stride, 1), cache.storage_offset() * itemsize
    )


def _even(pages: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """All layers as (layer, block, byte), if they lie in one memory at equal distances."""
    first = pages[0]
    kinds = {(each.untyped_storage().data_ptr(), each.shape, each.stride()) for each in pages}
    starts = [each.storage_offset() for each in pages]
    steps = {after - before for before, after in pairwise(starts)}
    if len(kinds) != 1 or len(steps) > 1 or min(steps, default=1) <= 0:
        return None
    step = steps.pop() if steps else first.numel()
    return first.as_strided(
        (len(pages), *first.shape), (step, *first.stride()), first.storage_offset()
    )
