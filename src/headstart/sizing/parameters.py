"""Counts the parameters that one token of a prompt is multiplied with.

Neither the embedding (a look-up) nor the output layer (only of the last token) counts; of a mixture
of experts the chosen ones and the shared ones do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstart.sizing.configfile import Fields


def active_parameters(fields: Fields, kind: str) -> int:
    """Of all layers of a config. Raises ConfigError, which names the field in the way."""
    num = fields.count("num_hidden_layers")
    attention = _latent(fields) if fields.optional("kv_lora_rank") else _attention(fields)
    return num * attention + _feed_forward(fields, kind, num)


def _attention(fields: Fields) -> int:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.optional("num_key_value_heads") or heads
    return 2 * hidden * fields.head_dim * (heads + kv_heads)


def _latent(fields: Fields) -> int:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    rank, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    nope, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    queries = heads * (nope + rope)
    low = fields.optional("q_lora_rank")
    query = hidden * low + low * queries if low else hidden * queries
    keys = hidden * (rank + rope) + rank * heads * (nope + value)
    return query + keys + heads * value * hidden


def _feed_forward(fields: Fields, kind: str, num: int) -> int:
    """Gate, up and down of all layers."""
    hidden = fields.count("hidden_size")
    experts = fields.optional("num_experts", "num_local_experts", "n_routed_experts")
    if not experts:
        return num * 3 * hidden * fields.count("intermediate_size")
    chosen = fields.count("num_experts_per_tok", "experts_per_token")
    inner = fields.count("moe_intermediate_size", "intermediate_size")
    shared = fields.optional("shared_expert_intermediate_size")
    shared = shared or inner * fields.optional("n_shared_experts")
    one = 3 * hidden * (chosen * inner + shared) + hidden * experts
    dense = min(num, fields.optional("first_k_dense_replace"))
    sparse = num - dense
    if kind == "jamba":  # only every n-th layer is a mixture
        sparse = num // fields.count("expert_layer_period")
        dense = num - sparse
    wide = fields.count("intermediate_size") if dense else 0
    return sparse * one + dense * 3 * hidden * wide
