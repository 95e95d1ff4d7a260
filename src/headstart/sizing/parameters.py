"""Counts the parameters that one token of a prompt is multiplied with.

Neither the embedding (a look-up) nor the output layer (only of the last token) counts; of a mixture
of experts the chosen ones and the shared ones do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstart.sizing.configfile import Fields

GATED = frozenset({"qwen3_next", "qwen3_5_text"})


def active_parameters(fields: Fields, kind: str, num_recurrent: int = 0) -> int:
    """Of all layers of a config, so many of them recurrent.

    Raises ConfigError, which names the field in the way.
    """
    num = fields.count("num_hidden_layers")
    attending = num - num_recurrent
    total = _feed_forward(fields, kind, num)
    if attending:
        one = _latent(fields) if fields.optional("kv_lora_rank") else _attention(fields, kind)
        total += attending * one
    if num_recurrent:
        gated = "linear_num_value_heads" in fields.config
        total += num_recurrent * (_gated_delta(fields) if gated else _mamba(fields))
    return total


def _attention(fields: Fields, kind: str) -> int:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.optional("num_key_value_heads") or heads
    # Each query head of these has a gate as wide as itself.
    gates = heads if kind in GATED else 0
    return hidden * fields.head_dim * (2 * heads + 2 * kv_heads + gates)


def _gated_delta(fields: Fields) -> int:
    """Keys, values, gates and the convolution of a linear attention layer."""
    hidden = fields.count("hidden_size")
    heads = fields.count("linear_num_value_heads")
    keys = fields.count("linear_num_key_heads") * fields.count("linear_key_head_dim")
    values = heads * fields.count("linear_value_head_dim")
    inputs = hidden * (2 * keys + 2 * values + 2 * heads)
    return inputs + (2 * keys + values) * fields.count("linear_conv_kernel_dim") + values * hidden


def _mamba(fields: Fields) -> int:
    hidden, state = fields.count("hidden_size"), fields.count("mamba_d_state")
    inner = fields.count("mamba_expand") * hidden
    rank = fields.config.get("mamba_dt_rank")
    low = rank if isinstance(rank, int) else -(-hidden // 16)  # "auto"
    projections = hidden * 2 * inner + inner * (low + 2 * state) + low * inner + inner * hidden
    return projections + inner * fields.count("mamba_d_conv")


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
    if fields.optional("shared_expert_intermediate_size"):
        one += hidden  # its gate
    dense = min(num, fields.optional("first_k_dense_replace"))
    sparse = num - dense
    if kind == "jamba":  # only every n-th layer is a mixture
        period, offset = fields.count("expert_layer_period"), fields.optional("expert_layer_offset")
        sparse = sum(layer % period == offset for layer in range(num))
        dense = num - sparse
    wide = fields.count("intermediate_size") if dense else 0
    return sparse * one + dense * 3 * hidden * wide
