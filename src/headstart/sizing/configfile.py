"""Reads a model's `config.json` (of Transformers) as an `Architecture`.

What a config does not say is not guessed: a field that the KV depends on must be there, and an
architecture that is not known is refused, because its KV may be laid out in another way.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from headstart.errors import ConfigError
from headstart.sizing.architecture import Architecture, Layer, LayerKind
from headstart.sizing.fields import GATED, Fields, shown
from headstart.sizing.parameters import active_parameters

_MODELS = "headstart.sizing.models"
_LATENT = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3"})
_PLAIN = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma"),
        *("phi3", "phimoe", "olmo", "olmo2", "olmo3", "olmoe", "granite", "granitemoe", "cohere"),
        *("stablelm", "internlm2", "glm", "glm4", "glm4_moe", "smollm3"),
        *("gemma2", "gemma3_text", "cohere2", "gpt_oss", "exaone4", "ernie4_5"),
        *("hunyuan_v1_dense", "seed_oss", "minimax_m2", "qwen2_vl", "qwen2_vl_text"),
        *("qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
        *GATED,
        "jamba",
    }
)
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "olmo3": 4, "exaone4": 4}
"""Every n-th layer attends to everything, where a config does not say."""
_WINDOWED = frozenset({"mistral", "mixtral", "phi3", "phimoe"})
_OWN_WINDOW = frozenset({"mistral", *_PATTERNS})
"""They have a window, if sliding_window is left out, and none if it is null."""
_INNER = ("text_config", "language_config", "llm_config", "thinker_config")
_MAX_LAYERS = 10_000
_KINDS = {
    "full_attention": LayerKind.ATTENTION,
    "attention": LayerKind.ATTENTION,
    "sliding_attention": LayerKind.WINDOW,
    "chunked_attention": LayerKind.WINDOW,
    "linear_attention": LayerKind.RECURRENT,
    "mamba": LayerKind.RECURRENT,
}
_STATE_NBYTES = 4
"""Engines keep recurrent states in float32 unless told otherwise."""
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
_QUANTIZED = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "fp4", "nvfp4": "fp4"}
"""By quant_method, or ModelOpt's quant_algo."""


def known_models() -> tuple[str, ...]:
    """Names of the models that come with Headstart."""
    found = (each.name for each in files(_MODELS).iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in found if name.endswith(".json")))


def read_model(name: str) -> Architecture:
    """The architecture of a config.json, its folder, or a model that comes with Headstart.

    Raises ConfigError.
    """
    if name in known_models():
        return parse_model(
            name, files(_MODELS).joinpath(f"{name}.json").read_text(encoding="utf-8")
        )
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model {name!r} is neither a readable config.json, nor a folder with one, nor one of "
            f"{', '.join(known_models())}"
        ) from error
    return parse_model(str(path), text)


def parse_model(name: str, text: str) -> Architecture:
    """The architecture that a config.json describes. Raises ConfigError."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model {name}: no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model {name}: a config.json is a JSON object")
    levels = _levels(config)
    fields = Fields(name, levels[0])
    if fields.kind not in _PLAIN and fields.kind not in _LATENT:
        raise ConfigError(
            f"model {name}: the layout of the KV of model_type {shown(fields.kind)} is not known "
            f"here; known are {', '.join(sorted(_PLAIN | _LATENT))}. If it is laid out as one of "
            "them, give a config.json with that model_type"
        )
    kinds = Counter(_kinds(fields))
    given = _given_parameters(name, levels)
    counted = 0 if given else active_parameters(fields, kinds[LayerKind.RECURRENT])
    return Architecture(
        name=str(_first(levels, "name") or name),
        layers=_layers(fields, kinds),
        active_parameters=given or counted,
        parameters_from=(
            "given as active_parameters" if given else "counted from the config, no vocabulary"
        ),
        max_tokens=fields.count("max_position_embeddings"),
        dtype=_dtype(name, levels),
        weights_dtype=_weights_dtype(levels),
        source=str(_first(levels, "source") or ""),
    )


def _levels(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The language model's part, then what is around it: models of images and text nest it."""
    levels = [config]
    while "num_hidden_layers" not in levels[0]:
        inner = (levels[0].get(name) for name in _INNER)
        found = next((each for each in inner if isinstance(each, dict)), None)
        if found is None:
            break
        levels.insert(0, found)
    return levels


def _first(levels: list[Mapping[str, Any]], *names: str) -> Any:
    """What the innermost level that has one of these fields says, else None."""
    for level in levels:
        for name in names:
            if level.get(name) is not None:
                return level[name]
    return None


def _given_parameters(name: str, levels: list[Mapping[str, Any]]) -> int:
    given = _first(levels, "active_parameters")
    if given is None:
        return 0
    if isinstance(given, bool) or not isinstance(given, int | float) or not 1 <= given <= 1e15:
        raise ConfigError(
            f"model {name}: active_parameters is {shown(given)}; supply a number such as 13e9, "
            "or leave it out"
        )
    return int(given)


def _layers(fields: Fields, kinds: Mapping[LayerKind, int]) -> tuple[Layer, ...]:
    make: dict[LayerKind, Callable[[Fields, int], Layer]] = {
        LayerKind.ATTENTION: _attention,
        LayerKind.WINDOW: _window,
        LayerKind.LATENT: _latent,
        LayerKind.RECURRENT: _recurrent,
    }
    return tuple(make[each](fields, count) for each, count in kinds.items())


def _kinds(fields: Fields) -> list[LayerKind]:
    num, config = fields.count("num_hidden_layers"), fields.config
    if num > _MAX_LAYERS:
        raise ConfigError(f"model {fields.name}: num_hidden_layers is {num}; at most {_MAX_LAYERS}")
    if fields.kind in _LATENT:
        return [LayerKind.LATENT] * num
    named = config.get("layer_types") or config.get("layers_block_type")
    if named is not None:
        return _named(fields.name, named, num)
    if fields.kind in GATED:
        return _every(num, fields.count("full_attention_interval"), rest=LayerKind.RECURRENT)
    if fields.kind == "jamba":
        period, offset = fields.count("attn_layer_period"), fields.whole("attn_layer_offset")
        attends = [layer % period == offset for layer in range(num)]
        return [LayerKind.ATTENTION if each else LayerKind.RECURRENT for each in attends]
    return _windows(fields, num)


def _named(name: str, named: object, num: int) -> list[LayerKind]:
    found = [str(each) for each in named] if isinstance(named, list) else []
    unknown = sorted(set(found) - set(_KINDS))
    if unknown or len(found) != num:
        raise ConfigError(
            f"model {name}: layer_types must name {num} layers of the kinds {', '.join(_KINDS)}"
            + (f", not {shown(', '.join(unknown))}" if unknown else f"; it names {len(found)}")
        )
    return [_KINDS[each] for each in found]


def _windows(fields: Fields, num: int) -> list[LayerKind]:
    """Which layers have a window, by the rule of the model's type."""
    kind, config = fields.kind, fields.config
    if kind in _OWN_WINDOW and "sliding_window" not in config:
        raise ConfigError(
            f"model {fields.name}: sliding_window is missing; supply it, or null if there is none"
        )
    if not fields.optional("sliding_window", "attention_chunk_size"):
        return [LayerKind.ATTENTION] * num
    if kind in _PATTERNS:
        every = fields.optional("sliding_window_pattern", "_sliding_window_pattern")
        return _every(num, every or _PATTERNS[kind], rest=LayerKind.WINDOW)
    if config.get("use_sliding_window"):
        full = min(num, fields.whole("max_window_layers"))
        return [LayerKind.ATTENTION] * full + [LayerKind.WINDOW] * (num - full)
    # Qwen configs name a window that they do not use.
    return [LayerKind.WINDOW if kind in _WINDOWED else LayerKind.ATTENTION] * num


def _every(num: int, interval: int, *, rest: LayerKind) -> list[LayerKind]:
    return [LayerKind.ATTENTION if (layer + 1) % interval == 0 else rest for layer in range(num)]


def _attention(fields: Fields, count: int) -> Layer:
    kv_heads = fields.kv_heads
    return Layer(
        kind=LayerKind.ATTENTION,
        count=count,
        elements=2 * kv_heads * fields.head_dim,
        heads=fields.count("num_attention_heads"),
        kv_heads=kv_heads,
        head_dim=fields.head_dim,
    )


def _window(fields: Fields, count: int) -> Layer:
    full = _attention(fields, count)
    return Layer(
        kind=LayerKind.WINDOW,
        count=count,
        elements=full.elements,
        heads=full.heads,
        kv_heads=full.kv_heads,
        head_dim=full.head_dim,
        window=fields.count("sliding_window", "attention_chunk_size"),
    )


def _latent(fields: Fields, count: int) -> Layer:
    rope = fields.count("qk_rope_head_dim")
    key = fields.count("qk_nope_head_dim") + rope
    return Layer(
        kind=LayerKind.LATENT,
        count=count,
        elements=fields.count("kv_lora_rank") + rope,
        heads=fields.count("num_attention_heads"),
        head_dim=(key + fields.count("v_head_dim")) // 2,
    )


def _recurrent(fields: Fields, count: int) -> Layer:
    if "linear_num_value_heads" in fields.config:
        keys = fields.count("linear_num_key_heads") * fields.count("linear_key_head_dim")
        heads = fields.count("linear_num_value_heads")
        values = heads * fields.count("linear_value_head_dim")
        state = values * fields.count("linear_key_head_dim")
        tail = (2 * keys + values) * fields.count("linear_conv_kernel_dim")
    else:
        inner = fields.count("mamba_expand") * fields.count("hidden_size")
        state = inner * fields.count("mamba_d_state")
        tail = inner * fields.count("mamba_d_conv")
    return Layer(kind=LayerKind.RECURRENT, count=count, state_nbytes=(state + tail) * _STATE_NBYTES)


def _dtype(name: str, levels: list[Mapping[str, Any]]) -> str:
    """Of the KV, unless it is chosen: that of the activations."""
    given = _first(levels, "dtype", "torch_dtype")
    if given is None:
        raise ConfigError(f"model {name}: dtype is missing; supply bfloat16, say: it is the KV's")
    if not isinstance(given, str) or given not in _DTYPES:
        allowed = ", ".join(_DTYPES)
        raise ConfigError(f"model {name}: dtype {shown(given)} is unknown; allowed: {allowed}")
    return _DTYPES[given]


def _weights_dtype(levels: list[Mapping[str, Any]]) -> str:
    """In which a GPU with units for it multiplies. Weights of 4 bits alone are unpacked to 16."""
    quantized = _first(levels, "quantization_config", "compression_config")
    if not isinstance(quantized, dict):
        return "bfloat16"
    method, algorithm = quantized.get("quant_method"), quantized.get("quant_algo")
    if method == "compressed-tensors":
        return _compressed_dtype(quantized.get("config_groups"))
    return _QUANTIZED.get(str(algorithm or method).lower(), "bfloat16")


def _compressed_dtype(groups: object) -> str:
    """Of compressed-tensors: floats, where inputs are quantized as well."""
    found = set()
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and group.get("input_activations"):
            found.add((str(weights.get("type")), str(weights.get("num_bits"))))
    known = {frozenset({("float", "8")}): "fp8", frozenset({("float", "4")}): "fp4"}
    return known.get(frozenset(found), "bfloat16")
