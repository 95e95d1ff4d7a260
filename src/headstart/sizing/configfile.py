"""Reads a model's `config.json` (of Transformers) as an `Architecture`.

What a config does not say is not guessed: a field that the KV depends on must be there, and an
architecture that is not known is refused, because its KV may be laid out in another way.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from headstart.errors import ConfigError
from headstart.sizing.architecture import Architecture, Layer, LayerKind
from headstart.sizing.parameters import GATED, active_parameters

_MODELS = "headstart.sizing.models"
_LATENT = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3"})
_PLAIN = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma"),
        *("phi3", "phimoe", "olmo", "olmo2", "olmo3", "olmoe", "granite", "granitemoe", "cohere"),
        *("stablelm", "internlm2", "glm", "glm4", "glm4_moe", "smollm3"),
        *("gemma2", "gemma3_text", "cohere2", "gpt_oss", "exaone4", "ernie4_5"),
        *("hunyuan_v1_dense", "seed_oss", "minimax_m2"),
        *GATED,
        "jamba",
    }
)
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "olmo3": 4, "exaone4": 4}
"""Every n-th layer attends to everything, where a config does not say."""
_WINDOWED = frozenset({"mistral", "mixtral", "phi3", "phimoe"})
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
        text = path.read_text(encoding="utf-8")
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
    except ValueError as error:
        raise ConfigError(f"model {name}: no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model {name}: a config.json is a JSON object")
    # Models for images and text keep the language model's part one level down.
    outer = config
    if isinstance(config.get("text_config"), dict) and "num_hidden_layers" not in config:
        config = config["text_config"]
    fields = Fields(name, config)
    kind = fields.text("model_type")
    if kind not in _PLAIN and kind not in _LATENT:
        raise ConfigError(
            f"model {name}: the layout of the KV of model_type {kind!r} is not known here; known "
            f"are {', '.join(sorted(_PLAIN | _LATENT))}. If it is laid out as one of them, give a "
            "config.json with that model_type"
        )
    kinds = Counter(_kinds(fields, kind))
    given = config.get("active_parameters")
    if given is not None and not (isinstance(given, int | float) and given >= 1):
        raise ConfigError(f"model {name}: active_parameters is {given!r}; supply a number, or none")
    counted = 0 if given else active_parameters(fields, kind, kinds[LayerKind.RECURRENT])
    return Architecture(
        name=str(config.get("name") or name),
        layers=_layers(fields, kinds),
        active_parameters=int(given or counted),
        parameters_from=(
            "given as active_parameters" if given else "counted from the config, no vocabulary"
        ),
        max_tokens=fields.count("max_position_embeddings"),
        dtype=_dtype(name, config, outer),
        weights_dtype=_weights_dtype(config, outer),
    )


class Fields:
    """The fields of a config, with errors that name them."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name, self.config = name, config

    def count(self, *names: str) -> int:
        """The first of these fields that is there, a whole number above 0."""
        for name in names:
            value = self.config.get(name)
            if value is not None:
                break
        else:
            raise ConfigError(f"model {self.name}: {' or '.join(names)} is missing; supply it")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"model {self.name}: {name} is {value!r}; it must be a whole number")
        return value

    def optional(self, *names: str) -> int:
        """As `count`, but 0 where none is there."""
        return self.count(*names) if any(self.config.get(name) for name in names) else 0

    def text(self, name: str) -> str:
        """A field that is text."""
        value = self.config.get(name)
        if not isinstance(value, str):
            raise ConfigError(f"model {self.name}: {name} is missing; supply it")
        return value

    @property
    def head_dim(self) -> int:
        """Of a query head."""
        return self.optional("head_dim") or (
            self.count("hidden_size") // self.count("num_attention_heads")
        )


def _layers(fields: Fields, kinds: Mapping[LayerKind, int]) -> tuple[Layer, ...]:
    make: dict[LayerKind, Callable[[Fields, int], Layer]] = {
        LayerKind.ATTENTION: _attention,
        LayerKind.WINDOW: _window,
        LayerKind.LATENT: _latent,
        LayerKind.RECURRENT: _recurrent,
    }
    return tuple(make[each](fields, count) for each, count in kinds.items())


def _kinds(fields: Fields, kind: str) -> list[LayerKind]:
    num = fields.count("num_hidden_layers")
    config = fields.config
    if kind in _LATENT:
        return [LayerKind.LATENT] * num
    named = config.get("layer_types") or config.get("layers_block_type")
    if named is not None:
        return _named(fields.name, named, num)
    if kind in GATED:
        return _every(num, fields.count("full_attention_interval"), rest=LayerKind.RECURRENT)
    if kind == "jamba":
        period, offset = fields.count("attn_layer_period"), config.get("attn_layer_offset", 0)
        attends = [layer % period == offset for layer in range(num)]
        return [LayerKind.ATTENTION if each else LayerKind.RECURRENT for each in attends]
    return _windows(fields, kind, num)


def _named(name: str, named: Sequence[object], num: int) -> list[LayerKind]:
    unknown = sorted({str(each) for each in named} - set(_KINDS))
    if unknown or len(named) != num:
        raise ConfigError(
            f"model {name}: layer_types must name {num} layers of the kinds {', '.join(_KINDS)}"
            + (f", not {', '.join(unknown)}" if unknown else f"; it names {len(named)}")
        )
    return [_KINDS[str(each)] for each in named]


def _windows(fields: Fields, kind: str, num: int) -> list[LayerKind]:
    """Which layers have a window, by the rule of the model's type."""
    if not fields.optional("sliding_window", "attention_chunk_size"):
        return [LayerKind.ATTENTION] * num
    if kind in _PATTERNS:
        every = fields.optional("sliding_window_pattern", "_sliding_window_pattern")
        return _every(num, every or _PATTERNS[kind], rest=LayerKind.WINDOW)
    if fields.config.get("use_sliding_window"):
        full = min(num, fields.optional("max_window_layers"))
        return [LayerKind.ATTENTION] * full + [LayerKind.WINDOW] * (num - full)
    # Qwen configs name a window that they do not use.
    return [LayerKind.WINDOW if kind in _WINDOWED else LayerKind.ATTENTION] * num


def _every(num: int, interval: int, *, rest: LayerKind) -> list[LayerKind]:
    return [LayerKind.ATTENTION if (layer + 1) % interval == 0 else rest for layer in range(num)]


def _attention(fields: Fields, count: int) -> Layer:
    heads = fields.count("num_attention_heads")
    kv_heads = fields.optional("num_key_value_heads") or heads
    return Layer(
        kind=LayerKind.ATTENTION,
        count=count,
        elements=2 * kv_heads * fields.head_dim,
        heads=heads,
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


def _dtype(name: str, config: Mapping[str, Any], outer: Mapping[str, Any]) -> str:
    """Of the KV, unless it is chosen: that of the activations."""
    for each in (config, outer):
        given = each.get("dtype") or each.get("torch_dtype")
        if given is None:
            continue
        if given not in _DTYPES:
            allowed = ", ".join(_DTYPES)
            raise ConfigError(f"model {name}: dtype {given!r} is unknown; allowed: {allowed}")
        return _DTYPES[given]
    raise ConfigError(f"model {name}: dtype is missing; supply bfloat16, say: it is the KV's")


def _weights_dtype(config: Mapping[str, Any], outer: Mapping[str, Any]) -> str:
    quantized = config.get("quantization_config") or outer.get("quantization_config") or {}
    # Weights of 4 bits without units for them are multiplied in 16.
    return _QUANTIZED.get(str(quantized.get("quant_method")), "bfloat16")
