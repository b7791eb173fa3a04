"""The state of linear-attention and Mamba layers: its size a request, from the family's fields.

Shapes follow the servers' state pools: SGLang ``configs/mamba_utils.py`` and vLLM ``mamba_utils.py`` both keep, a layer
a request, a convolution state of ``kernel - 1`` values a channel and a recurrent state of heads x key dim x value dim.
"""

from __future__ import annotations

from forebay.model.config_fields import ConfigFields
from forebay.model.geometry import RecurrentShape

__all__ = ["recurrent_shape"]


def recurrent_shape(fields: ConfigFields, model_type: str) -> RecurrentShape:
    """The state of one recurrent layer of ``model_type``.

    Raises:
        UsageError: a field it needs is missing.
    """
    if "linear_num_value_heads" in fields or model_type.startswith(("qwen3_next", "qwen3_5")):
        return _gated_delta(fields)
    if "linear_attn_config" in fields:
        return _kimi_delta(fields)
    if model_type.startswith("bailing"):
        return _lightning(fields)
    if model_type.startswith("lfm2"):
        hidden = fields.integer("conv_dim", "hidden_size")
        return RecurrentShape(
            conv_channels=hidden, conv_kernel=fields.integer("conv_L_cache", default=3), state_values=0
        )
    return _mamba(fields, model_type)


def _gated_delta(fields: ConfigFields) -> RecurrentShape:
    """Qwen3-Next and Qwen3.5: gated delta net; the convolution runs over queries, keys and values."""
    key_dim, value_dim = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    key_heads, value_heads = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    kernel = fields.integer("linear_conv_kernel_dim")
    return RecurrentShape(channels, kernel, value_heads * key_dim * value_dim)


def _kimi_delta(fields: ConfigFields) -> RecurrentShape:
    """Kimi-Linear: equal heads for queries, keys and values."""
    linear = fields.child("linear_attn_config")
    heads, dim = linear.integer("num_heads"), linear.integer("head_dim")
    kernel = linear.integer("short_conv_kernel_size", default=4)
    return RecurrentShape(3 * heads * dim, kernel, heads * dim * dim)


def _lightning(fields: ConfigFields) -> RecurrentShape:
    """Lightning attention (Bailing 2.5): a key x value state a head, no convolution."""
    heads = fields.integer("num_attention_heads")
    dim = fields.integer("head_dim", default=fields.integer("hidden_size") // heads)
    return RecurrentShape(0, 1, heads * dim * dim)


def _mamba(fields: ConfigFields, model_type: str) -> RecurrentShape:
    hidden = fields.integer("hidden_size")
    if model_type == "jamba":  # Mamba 1: one state vector a channel
        inner = fields.integer("mamba_expand") * hidden
        return RecurrentShape(inner, fields.integer("mamba_d_conv"), inner * fields.integer("mamba_d_state"))
    heads = fields.integer("mamba_num_heads", "mamba_n_heads")
    state = fields.integer("ssm_state_size", "mamba_d_state")
    groups = fields.integer("n_groups", "mamba_n_groups")
    inner = _mamba_width(fields, heads, hidden)
    return RecurrentShape(inner + 2 * groups * state, fields.integer("conv_kernel", "mamba_d_conv"), inner * state)


def _mamba_width(fields: ConfigFields, heads: int, hidden: int) -> int:
    """Channels of a Mamba 2 mixer: stated, heads x head dim, or a multiple of the hidden size."""
    stated = fields.optional_integer("mamba_d_ssm")
    if stated is not None:
        return stated
    dim = fields.values.get("mamba_head_dim", fields.values.get("mamba_d_head"))
    return heads * dim if isinstance(dim, int) else fields.integer("mamba_expand", "expand", default=2) * hidden
