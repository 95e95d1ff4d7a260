"""Which models can be cached block by block: those with plain full attention in every layer.

A block of KV may be used again only where the KV of a token depends on nothing but the tokens up to
it. Everything else is refused when the engine is made, with the feature that is in the way.
"""

from __future__ import annotations

import inspect

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from headstart.engines.kv import KvShape
from headstart.errors import ConfigError, UnsupportedModelError

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def cache_argument(model: PreTrainedModel) -> str:
    """The argument by which the model's `forward` takes a cache; transformers 5 renamed it."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UnsupportedModelError(
        f"{type(model).__name__} takes no KV cache, so there is none to keep"
    )


def kv_shape(model: PreTrainedModel) -> KvShape:
    """Check that the model can be cached and find the shape of its KV, by running two tokens.

    Raises UnsupportedModelError when it cannot, ConfigError when it is in training mode.
    """
    name = type(model).__name__
    if model.training:
        raise ConfigError(f"{name} is in training mode: dropout changes its KV; call model.eval()")
    reason = _reason_in_config(model)
    if reason is not None:
        raise UnsupportedModelError(f"{name} cannot be cached block by block: {reason}")
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        if type(layer) is not DynamicLayer:
            raise UnsupportedModelError(
                f"{name} cannot be cached block by block: it has a layer whose cache is a "
                f"{type(layer).__name__}, not plain full attention"
            )
    with torch.inference_mode():
        tokens = torch.zeros((1, 2), dtype=torch.long, device=model.device)
        model(input_ids=tokens, use_cache=True, **{cache_argument(model): cache})
    return _common_shape(name, cache)


def _reason_in_config(model: PreTrainedModel) -> str | None:
    """The feature that is in the way, if the configuration names one."""
    config = model.config
    decoder = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or getattr(decoder, "add_cross_attention", False):
        return "its KV depends on an encoder's input"
    if getattr(decoder, "use_bidirectional_attention", False):
        return "its attention is bidirectional, so KV depends on later tokens"
    rope = getattr(decoder, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            return f"its {parameters['rope_type']} rotary embedding depends on the prompt's length"
    implementation = getattr(model.generation_config, "cache_implementation", None)
    if implementation not in (None, "dynamic"):
        return f"its generation config asks for a {implementation} cache"
    return None


def _common_shape(name: str, cache: Cache) -> KvShape:
    """The shape that all layers share, from a cache that holds two tokens."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    if any(tensor is None for tensor in tensors):
        raise UnsupportedModelError(f"{name} cannot be cached block by block: a layer keeps no KV")
    kinds = {(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) != 1:
        raise UnsupportedModelError(
            f"{name} cannot be cached block by block: the KV of its layers differ in shape, dtype "
            "or device"
        )
    ((shape, dtype, device),) = kinds
    if len(shape) != 4 or shape[0] != 1 or shape[2] != 2:
        raise UnsupportedModelError(
            f"{name} cannot be cached block by block: its KV is not (batch, head, token, dim)"
        )
    return KvShape(
        num_layers=len(cache.layers),
        num_heads=shape[1],
        head_dim=shape[3],
        dtype=dtype,
        device=device,
    )
