"""Which engines can be cached: the others are refused at start, each with what is in the way.

A wrong or useless cache is worse than none. Importing this module is cheap and needs no vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headstart.engines.vllm.shape import block_shape, layout_name
from headstart.errors import UnsupportedModelError
from headstart.types import MAX_BLOCK_NBYTES
from headstart.units import format_nbytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_SPECULATION_WITHOUT_KV = frozenset({"medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix"})


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise UnsupportedModelError, with what is in the way and the flag that changes it."""
    reason = (
        _reason_in_ranks(vllm_config)
        or _reason_in_model(vllm_config)
        or _reason_in_groups(kv_cache_config)
        or _reason_in_blocks(vllm_config, kv_cache_config)
    )
    if reason is not None:
        raise UnsupportedModelError(f"Headstart cannot cache this engine's KV: {reason}")


def _reason_in_ranks(vllm_config: VllmConfig) -> str | None:
    parallel = vllm_config.parallel_config
    for kind in ("pipeline_parallel", "decode_context_parallel", "prefill_context_parallel"):
        if getattr(parallel, f"{kind}_size") > 1:
            option = f"--{kind.replace('_', '-')}-size"
            return f"{kind.replace('_', ' ')} ranks are not supported; start vLLM with {option} 1"
    if parallel.world_size != parallel.tensor_parallel_size:
        return (
            f"its {parallel.world_size} workers are not {parallel.tensor_parallel_size} "
            "tensor-parallel ranks; run data parallelism without an external launcher"
        )
    return None


def _reason_in_model(vllm_config: VllmConfig) -> str | None:
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    if model.is_encoder_decoder:
        return "in an encoder-decoder model KV depends on the encoder's input; no flag changes that"
    if model.is_diffusion or vllm_config.diffusion_config is not None:
        return "a diffusion model rewrites the KV of tokens it has computed; no flag changes that"
    if vllm_config.attention_config.use_non_causal:
        return "with non-causal attention KV depends on later tokens; leave use_non_causal unset"
    if vllm_config.attention_config.hisparse_config is not None:
        return "HiSparse keeps KV outside the engine's blocks; leave hisparse_config unset"
    if speculative is not None and speculative.method not in _SPECULATION_WITHOUT_KV:
        return (
            f"the draft layers of speculative method {speculative.method!r} keep KV of their own; "
            "leave out --speculative-config or use method ngram or suffix in it"
        )
    return None


def _reason_in_groups(kv_cache_config: KVCacheConfig) -> str | None:
    from vllm.v1 import kv_cache_interface as kv

    groups = kv_cache_config.kv_cache_groups
    local_types = (kv.SlidingWindowSpec, kv.SlidingWindowMLASpec, kv.ChunkedLocalAttentionSpec)
    specs = [spec for group in groups for spec in kv.iter_layer_specs(group.kv_cache_spec)]
    others = [spec for spec in specs if type(spec) not in local_types]
    # What no flag changes comes first.
    reason = next(filter(None, map(_reason_in_spec, others)), None)
    if reason is None and not groups:
        reason = "the model keeps no KV cache"
    elif reason is None and len(groups) > 1:
        reason = (
            f"its layers form {len(groups)} groups with blocks of their own; start vLLM with "
            "--disable-hybrid-kv-cache-manager, which gives all layers the blocks of full attention"
        )
    elif reason is None and len(others) < len(specs):
        reason = (
            "every layer forgets the KV outside its window; start vLLM with "
            "--disable-sliding-window, which limits the context to the window"
        )
    elif reason is None and groups[0].is_eagle_group:
        reason = "draft layers share its KV cache; leave out --speculative-config"
    elif reason is None and (groups[0].host_resident or not groups[0].enable_kv_transfer):
        reason = "vLLM keeps its KV cache from connectors"
    return reason


def _reason_in_spec(spec: KVCacheSpec) -> str | None:
    from vllm.v1 import kv_cache_interface as kv

    if isinstance(spec, kv.MambaSpec):
        return "its state-space layers keep a running state, not KV; no flag changes that"
    if isinstance(spec, kv.CrossAttentionSpec | kv.EncoderOnlyAttentionSpec):
        return "the KV of encoder layers depends on the whole input; no flag changes that"
    # Subclasses drop, prepend or reinterpret KV in ways of their own.
    if type(spec) not in (kv.FullAttentionSpec, kv.MLAAttentionSpec):
        return f"KV kept as {type(spec).__name__} is neither full attention nor MLA"
    if spec.non_causal:
        return "its attention is bidirectional, so KV depends on later tokens"
    if spec.tokens_per_state != 1:
        return f"a layer keeps one state for {spec.tokens_per_state} tokens, not KV of each"
    return None


def _reason_in_blocks(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    if not vllm_config.cache_config.enable_prefix_caching:
        return (
            "prefix caching is off, so its blocks have no hashes; start vLLM with "
            "--enable-prefix-caching"
        )
    shape = block_shape(vllm_config, kv_cache_config)
    hashed = kv_cache_config.hash_block_size or shape.block_size
    if hashed != shape.block_size:
        return (
            f"a hash covers {hashed} tokens, a block holds {shape.block_size}; leave out "
            "--prefix-match-unit"
        )
    name = layout_name(vllm_config, kv_cache_config)
    if name not in KVCacheLayout.__members__ or not KVCacheLayout[name].is_block_compact:
        return (
            f"in the KV cache layout {name or 'that is not chosen yet'} a block's bytes lie "
            "scattered; set VLLM_KV_CACHE_LAYOUT=LBHNC in vLLM's environment"
        )
    if shape.block_nbytes > MAX_BLOCK_NBYTES:
        return (
            f"a block of {shape.block_size} tokens has {format_nbytes(shape.block_nbytes)}, over "
            f"the limit of {format_nbytes(MAX_BLOCK_NBYTES)}; use a smaller --block-size"
        )
    return None
