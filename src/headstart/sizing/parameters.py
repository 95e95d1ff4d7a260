"""Counts the parameters that one token of a prompt is multiplied with.

Neither the embedding (a look-up) nor the output layer (only of the last token) counts; of a mixture
of experts the chosen ones and the shared ones do.
"""

from __future__ import annotations

from headstart.errors import ConfigError
from headstart.sizing.fields import GATED, Fields


def active_parameters(fields: Fields, num_recurrent: int = 0) -> int:
    """Of all layers of a config, so many of them recurrent.

    Raises ConfigError, which names the field in the way.
    """
    num = fields.count("num_hidden_layers")
    attending = num - num_recurrent
    total = _feed_forward(fields, num)
    if attending:
        one = _latent(fields) if fields.optional("kv_lora_rank") else _attention(fields)
        total += attending * one
    if num_recurrent:
        gated = "linear_num_value_heads" in fields.config
        total += num_recurrent * (_gated_delta(fields) if gated else _mamba(fields))
    return total


def _attention(fields: Fields) -> int:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    # Each query head of these has a gate as wide as itself.
    gates = heads if fields.kind in GATED else 0
    return hidden * fields.head_dim * (2 * heads + 2 * fields.kv_heads + gates)


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


def _feed_forward(fields: Fields, num: int) -> int:
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
    dense = _num_dense(fields, num)
    wide = fields.count("intermediate_size") if dense else 0
    return (num - dense) * one + dense * 3 * hidden * wide


def _num_dense(fields: Fields, num: int) -> int:
    """Layers of a mixture that are none."""
    if fields.kind == "jamba":  # only every n-th layer is a mixture
        period, offset = fields.count("expert_layer_period"), fields.whole("expert_layer_offset")
        return sum(layer % period != offset for layer in range(num))
    first, step = fields.optional("first_k_dense_replace"), fields.optional("decoder_sparse_step")
    named = fields.config.get("mlp_only_layers") or ()
    if not isinstance(named, list | tuple) or not all(isinstance(each, int) for each in named):
        raise ConfigError(
            f"model {fields.name}: mlp_only_layers must be a list of the layers without experts"
        )
    step = step or 1
    return sum(layer < first or layer in named or (layer + 1) % step != 0 for layer in range(num))
