"""Who a vLLM engine's model is.

`make_namespace` names everything that must be equal for two blocks to be interchangeable. It is
asked once an epoch and adapter. What vLLM's own block hashes cover (tokens, adapter name, images,
salts) is not repeated here; what they leave out is:

    weights   files of the model folder, vLLM's version, the model's configuration with all
              overrides, quantisation, the compute and KV dtypes, the layers' pages, adapters
    isa       device, KV layout; on a CPU the instruction set K and V are packed for
    the rest  hash algorithm and seed, ranks, tenant, epoch

A source that cannot be named is not guessed: its namespace is random, so nothing outlives the
process. Importing this module is cheap and needs no vLLM; its functions run inside vLLM.
"""

from __future__ import annotations

import json
import platform
import secrets
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.engines.vllm.shape import block_shape, layer_pages, layout_name
from headstart.engines.vllm.weights import weights_fingerprint
from headstart.keys import BlockLayout, Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_FORMATS_READ_FROM_FOLDER = frozenset(
    {
        *("auto", "fastsafetensors", "gguf", "hf", "instanttensor", "mistral", "npcache", "pt"),
        *("safetensors", "sharded_state"),
    }
)
"""Values of `--load-format` that read the model folder; any other may get weights elsewhere."""

# Everything else in these configurations is taken to change KV: a field that is new in some vLLM
# costs a cold start, never a wrong hit.
_MODEL_WITHOUT_EFFECT = frozenset(
    {
        *("model", "model_weights", "revision", "hf_config", "hf_text_config", "hf_config_path"),
        *("config_format", "hf_overrides", "hf_token", "served_model_name", "multimodal_config"),
        *("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "seed"),
        *("allowed_local_media_path", "allowed_media_domains", "allow_deprecated_quantization"),
        *("spec_target_max_model_len", "return_sampling_mask", "max_logprobs", "logprobs_mode"),
        *("use_fp64_gumbel", "enable_trace_replay", "disable_cascade_attn", "logits_processors"),
        *("generation_config", "override_generation_config", "enable_prompt_embeds"),
        *("enable_sleep_mode", "sleep_preserve_parameter_names", "sleep_mode_backend"),
        *("sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend", "enable_cumem_allocator"),
        *("io_processor_plugin", "renderer_num_workers", "pooler_config"),
    }
)
_MULTIMODAL_WITHOUT_EFFECT = frozenset(
    {
        *("limit_per_prompt", "enable_mm_embeds", "mm_processor_cache_gb", "skip_mm_profiling"),
        *("mm_processor_cache_type", "mm_hasher_algorithm", "mm_shm_cache_max_object_size_mb"),
        *("mm_encoder_tp_mode", "interleave_mm_strings", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb"),
        "allow_missing_mm_embeddings",
    }
)
_LORA_WITHOUT_EFFECT = frozenset(
    {"max_loras", "max_cpu_loras", "max_lora_rank", "max_lora_cls_labels", "specialize_active_lora"}
)
_HF_WITHOUT_EFFECT = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A model's namespace. Where it is not `known`, it is random and `reason` says why."""

    namespace: Namespace
    known: bool
    reason: str


def advice(vllm_config: VllmConfig) -> list[str]:
    """What the operator should know about the block hashes; each sentence to be logged once."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm in ("xxhash", "xxhash_cbor"):
        return [
            f"block hashes are made by {algorithm}, which is not cryptographic and, unless "
            "PYTHONHASHSEED is set, seeded anew by each process, so that no block is found again "
            "after a restart; use --prefix-caching-hash-algo sha256_cbor"
        ]
    if algorithm == "sha256":
        return [
            "block hashes are made over Python pickles, which may differ between Python versions "
            "and, with adapters or images, between processes, so that blocks may not be found "
            "again; use --prefix-caching-hash-algo sha256_cbor"
        ]
    return []


def make_namespace(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, epoch: str = "", lora: str = ""
) -> Identity:
    """The namespace of this engine's blocks; the same in each process with the same configuration.

    To be called once, in the scheduler's process, after the workers have loaded the weights. `lora`
    is an adapter's fingerprint, `epoch` separates weights before and after an update. Reads the
    model's files. Raises ConfigError for a block over the size limit.
    """
    weights, reason = _weights(vllm_config, kv_cache_config, lora)
    shape = block_shape(vllm_config, kv_cache_config)
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    transfer = vllm_config.kv_transfer_config
    options = {} if transfer is None else transfer.kv_connector_extra_config
    namespace = Namespace(
        model=_model_name(vllm_config.model_config.model),
        weights=weights,
        layout=BlockLayout(
            block_size=shape.block_size,
            axes="rank byte",
            shape=(shape.world_size, shape.shard_stride),
            dtype="uint8",
        ),
        isa=_isa(vllm_config, kv_cache_config),
        hash_algorithm=algorithm,
        hash_seed=_hash_seed(algorithm),
        tensor_parallel=str(vllm_config.parallel_config.tensor_parallel_size),
        tenant=str(options.get("tenant", "")),
        epoch=epoch,
    )
    return Identity(namespace=namespace, known=not reason, reason=reason)


def _weights(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, lora: str) -> tuple[str, str]:
    """Digest of all that changes KV and "", or a random name and why the source is unknown."""
    reason = _reason_unknown(vllm_config)
    source = None if reason else _local_source(vllm_config)
    files = None if source is None else weights_fingerprint(source)
    if files is not None:
        try:
            facts = _facts(vllm_config, kv_cache_config)
        except TypeError as error:
            reason = f"its configuration has no canonical form: {error}"
        else:
            text = json.dumps([files, lora, facts], sort_keys=True, separators=(",", ":"))
            return blake2b(text.encode("ascii"), digest_size=32).hexdigest(), ""
    reason = reason or f"no weight files can be read at {vllm_config.model_config.model!r}"
    return f"unknown-{secrets.token_hex(32)}", reason


def _reason_unknown(vllm_config: VllmConfig) -> str:
    """Why the folder does not say which weights the engine has; empty when it does."""
    model, load_format = vllm_config.model_config, vllm_config.load_config.load_format
    if load_format not in _FORMATS_READ_FROM_FOLDER:
        return f"--load-format {load_format} may load weights from elsewhere than the model folder"
    if model.model_weights:
        return f"its weights come from {model.model_weights!r}"
    if vllm_config.weight_transfer_config is not None:
        return "--weight-transfer-config lets its weights be replaced while it runs"
    for name in ("text_model_id", "audio_model_id"):
        if getattr(model.hf_config, name, None) is not None:
            return f"its {name} names a second repository with weights"
    code = json.dumps(getattr(model.hf_config, "auto_map", None) or {}, default=str)
    if model.trust_remote_code and "--" in code and model.code_revision is None:
        return "its code comes from another repository; pin it with --code-revision"
    return ""


def _local_source(vllm_config: VllmConfig) -> Path | None:
    """The folder or file the weights were loaded from. Never goes to the network."""
    import huggingface_hub
    from vllm import envs

    model = vllm_config.model_config
    path = Path(model.model)
    if path.exists():
        return path
    if envs.VLLM_USE_MODELSCOPE:
        return None
    try:
        snapshot = huggingface_hub.snapshot_download(
            model.model,
            revision=model.revision,
            cache_dir=vllm_config.load_config.download_dir,
            local_files_only=True,
            # vLLM fetches the files it needs, so the snapshot may lack the others.
            ignore_patterns="*",
        )
    except (OSError, ValueError):
        return None
    return Path(snapshot)


def _facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    """What changes KV beside the weights, as JSON can hold it. Raises TypeError where it cannot."""
    import vllm
    from vllm.config.utils import get_hash_factors, normalize_value

    def fields(config: Any, without: frozenset[str] = frozenset()) -> dict[str, object] | None:
        return None if config is None else get_hash_factors(config, set(without))

    model, cache = vllm_config.model_config, vllm_config.cache_config
    load, additional = vllm_config.load_config, vllm_config.additional_config
    return {
        "vllm": vllm.__version__,
        "hf_config": normalize_value(_without_volatile(model.hf_config.to_dict())),
        "hf_text_config": normalize_value(_without_volatile(model.hf_text_config.to_dict())),
        "model": fields(model, _MODEL_WITHOUT_EFFECT),
        "multimodal": fields(model.multimodal_config, _MULTIMODAL_WITHOUT_EFFECT),
        "load": [load.load_format, load.ignore_patterns],
        "load_options": normalize_value(load.model_loader_extra_config),
        "cache": [cache.cache_dtype, *cache.kv_cache_dtype_skip_layers],
        "attention": fields(vllm_config.attention_config),
        "compilation": normalize_value(vllm_config.compilation_config.mode),
        "adapters": fields(vllm_config.lora_config, _LORA_WITHOUT_EFFECT),
        "platform": normalize_value(additional)
        if isinstance(additional, dict)
        else additional.compute_hash(),
        "pages": layer_pages(kv_cache_config),
    }


def _without_volatile(value: Any) -> Any:
    """A configuration without where it was found and who wrote it."""
    if isinstance(value, dict):
        return {k: _without_volatile(v) for k, v in value.items() if k not in _HF_WITHOUT_EFFECT}
    if isinstance(value, list):
        return [_without_volatile(item) for item in value]
    return value


def _model_name(model: str) -> str:
    """A name for people: the hub's, or that of the folder, never a path."""
    path = Path(model)
    if not path.exists():
        return model
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.resolve().name or "model"


def _hash_seed(algorithm: str) -> str:
    """The seed vLLM's block hashes will have, or where it must stay secret a digest of it.

    Resolved anew: vLLM itself does so only after it has constructed the connector, and until then
    `get_none_hash_seed` answers with the default. A random seed is another one in each call.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    seed: str = resolve_none_hash_seed(get_hash_fn_by_name(algorithm))
    if algorithm in ("sha256", "sha256_cbor"):
        return seed
    # With a known seed colliding prompts can be searched for; namespaces lie readable on disk.
    return blake2b(seed.encode(), digest_size=16).hexdigest()


def _isa(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """What decides how bytes lie inside a page: the device, and on a CPU its instruction set."""
    import torch
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.v1 import kv_cache_interface as kv

    layout = layout_name(vllm_config, kv_cache_config)
    if current_platform.device_type != "cpu":
        order = "shuffled" if envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT else "plain"
        name = current_platform.get_device_name()
        return f"{current_platform.device_type}/{name}/{order}/{layout}"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    dtype = vllm_config.model_config.dtype
    cache_dtype = vllm_config.cache_config.cache_dtype
    packings = {
        _get_attn_isa(dtype, layer.block_size, layer.head_size, cache_dtype)
        for layer in kv.iter_layer_specs(spec)
    }
    # vLLM has a build of its kernels for each of these.
    features = f"{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}"
    if torch.cpu._is_avx512_bf16_supported():
        features += "+bf16"
    return f"cpu/{features}/{'+'.join(sorted(packings))}/{layout}"
