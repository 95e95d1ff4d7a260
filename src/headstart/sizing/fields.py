"""The fields of a model's `config.json`, and what they mean where they are left out. Pure.

Where a config leaves a field out, Transformers takes a value of the model's type. What is the same
for all sizes of a type is known here; where it is one size's, the field must be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.errors import ConfigError

GATED = frozenset({"qwen3_next", "qwen3_5_text"})
"""Types whose linear attention layers and query heads have gates."""
_HEADS_ALIKE = frozenset(
    {
        *("llama", "phi3", "olmo", "olmo2", "olmo3", "olmoe", "granite", "granitemoe"),
        *("cohere", "cohere2", "hunyuan_v1_dense", "internlm2"),
    }
)
"""As many KV heads as query heads, if num_key_value_heads is left out."""
_OWN_HEAD_DIM = frozenset(
    {
        *("qwen3", "gemma", "gemma2", "gemma3_text", "gpt_oss", "glm", "glm4", "ernie4_5"),
        *("seed_oss", "minimax_m2", "qwen3_vl_text", *GATED),
    }
)
"""Not hidden_size / num_attention_heads, if head_dim is left out."""
_MAX_COUNT = 10**12
_MAX_SHOWN = 60


def shown(value: object) -> str:
    """A value of a config for people, cut short."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


class Fields:
    """The fields of a config, with errors that name them."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name, self.config = name, config
        self.kind = self.text("model_type")

    def count(self, *names: str) -> int:
        """The first of these fields that is there, a whole number above 0."""
        for name in names:
            if self.config.get(name) is not None:
                return self.whole(name, least=1)
        raise ConfigError(f"model {self.name}: {' or '.join(names)} is missing; supply it")

    def optional(self, *names: str) -> int:
        """As `count`, but 0 where none is there."""
        for name in names:
            if self.config.get(name):
                return self.count(name)
        return 0

    def whole(self, name: str, *, least: int = 0) -> int:
        """A field that must be there, a whole number of at least so much."""
        value = self.config.get(name)
        if value is None:
            raise ConfigError(f"model {self.name}: {name} is missing; supply it")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(
                f"model {self.name}: {name} is {shown(value)}; it must be a whole number"
            )
        if not least <= value <= _MAX_COUNT:
            raise ConfigError(
                f"model {self.name}: {name} is {shown(value)}; it must be a whole number from "
                f"{least} to {_MAX_COUNT:.0e}"
            )
        return value

    def text(self, name: str) -> str:
        """A field that is text."""
        value = self.config.get(name)
        if not isinstance(value, str):
            what = "missing" if value is None else f"{shown(value)}, no text"
            raise ConfigError(f"model {self.name}: {name} is {what}; supply it")
        return value

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        heads, name = self.count("num_attention_heads"), "num_key_value_heads"
        if self.config.get(name) is None:
            if name in self.config or self.kind in _HEADS_ALIKE:
                return heads
            raise ConfigError(
                f"model {self.name}: {name} is missing; supply it: models of type {self.kind} "
                "have fewer KV heads than query heads"
            )
        found = self.count(name)
        if heads % found:
            raise ConfigError(
                f"model {self.name}: num_attention_heads is {heads}, no multiple of {name}, {found}"
            )
        return found

    @property
    def head_dim(self) -> int:
        """Of a query head."""
        if self.config.get("head_dim") is not None:
            return self.count("head_dim")
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads")
        own = "head_dim" not in self.config and self.kind in _OWN_HEAD_DIM
        if own or hidden % heads:
            raise ConfigError(
                f"model {self.name}: head_dim is missing; supply it: it is not hidden_size / "
                f"num_attention_heads, {hidden} / {heads}"
            )
        return hidden // heads
