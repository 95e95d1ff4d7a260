"""How an engine's KV becomes blocks: pages of layers, shards of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headstart.errors import ConfigError
from headstart.units import align_up

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """How one logical block consists of the ranks' shards.

        [ shard of rank 0 | pad ][ shard of rank 1 | pad ] ...    rank r at r * shard_stride

    A shard is the pages of all layers, in the order of `layer_pages`. It is padded to whole
    memory pages only where there are several.
    """

    block_size: int
    shard_nbytes: int
    shard_stride: int
    world_size: int

    def __post_init__(self) -> None:
        if min(self.block_size, self.shard_nbytes, self.world_size) < 1:
            raise ConfigError(f"{self} must have a positive size")
        if self.shard_stride < self.shard_nbytes:
            raise ConfigError(f"shards of {self} overlap")

    @property
    def block_nbytes(self) -> int:
        """Bytes of one logical block."""
        return self.world_size * self.shard_stride


def layer_pages(kv_cache_config: KVCacheConfig) -> tuple[tuple[str, int], ...]:
    """Name of each layer that owns KV, and bytes from one rank's page of it to the next.

    In the order of the first group's `layer_names`, equal on the scheduler's and the workers' side.
    That is why the sizes come from the tensors: the scheduler's copy of the configuration keeps the
    specification of a single layer even where layers differ.
    """
    pages: dict[str, int] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        # Of the two strides one spans a page, the other all blocks or all layers.
        page_nbytes = min(tensor.layer_stride, tensor.block_stride)
        pages.update(dict.fromkeys(tensor.layers, page_nbytes))
    # Layers that share another's KV join the group on the workers, and own no tensor.
    names = kv_cache_config.kv_cache_groups[0].layer_names
    return tuple((name, pages[name]) for name in names if name in pages)


def block_shape(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> BlockShape:
    """The shape of this engine's logical blocks."""
    world_size = vllm_config.parallel_config.world_size
    shard_nbytes = sum(nbytes for _, nbytes in layer_pages(kv_cache_config))
    return BlockShape(
        block_size=kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
        shard_nbytes=shard_nbytes,
        shard_stride=shard_nbytes if world_size == 1 else align_up(shard_nbytes),
        world_size=world_size,
    )


def layout_name(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """The physical layout of the KV cache by vLLM's name for it; "" where it is not resolved."""
    name = kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout
    return {"HND": "LBHNC", "NHD": "LBNHC"}.get(name, name or "")
