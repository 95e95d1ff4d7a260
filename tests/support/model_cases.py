"""A small model's config.json, and variations of it."""

from __future__ import annotations

import json

from headstart.sizing.architecture import Architecture
from headstart.sizing.configfile import parse_model

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}


def parsed(**changes: object) -> Architecture:
    """With other values; None leaves a field out."""
    fields = {name: value for name, value in {**LLAMA, **changes}.items() if value is not None}
    return parse_model("tiny", json.dumps(fields))
