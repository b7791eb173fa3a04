"""Which layer does what: one Transformers layer-type name a layer, from whichever field the family uses for it."""

from __future__ import annotations

from forebay.errors import UsageError
from forebay.model.config_fields import ConfigFields

__all__ = ["layer_types"]

# Nemotron-H writes one letter a layer
_PATTERN = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}
_LEGACY = {"attention": "full_attention", "linear": "linear_attention"}


def layer_types(fields: ConfigFields, model_type: str, count: int) -> list[str]:
    """``count`` names: full_attention, sliding_attention, linear_attention, mamba, conv, hybrid, mlp, moe...

    An explicit list in the file wins; otherwise the family's own rule, as its configuration class computes it.
    """
    for name in ("layer_types", "layers_block_type", "block_types"):
        if name in fields:
            names = [_LEGACY.get(kind, kind) for kind in fields.texts(name, count)]
            return ["hybrid"] * count if model_type == "falcon_h1" else names
    if "hybrid_override_pattern" in fields:
        return _from_pattern(fields, count)
    if model_type == "falcon_h1":
        return ["hybrid"] * count
    special = _by_rule(fields, model_type, count)
    return special if special is not None else _by_window(fields, model_type, count)


def _from_pattern(fields: ConfigFields, count: int) -> list[str]:
    pattern = fields.text("hybrid_override_pattern")
    unknown = set(pattern) - set(_PATTERN)
    if unknown or len(pattern) < count:
        raise UsageError(
            f"{fields.where}: field 'hybrid_override_pattern' does not describe {count} layers: {pattern!r}"
        )
    return [_PATTERN[letter] for letter in pattern[:count]]


def _by_rule(fields: ConfigFields, model_type: str, count: int) -> list[str] | None:
    """Hybrids that say where attention is by period or by index."""
    if "linear_attn_config" in fields:  # Kimi-Linear: layer numbers from 1
        full = set(fields.child("linear_attn_config").integers("full_attn_layers"))
        return ["full_attention" if i + 1 in full else "linear_attention" for i in range(count)]
    if model_type.startswith("bailing") and "layer_group_size" in fields:  # the last of each group attends
        group = fields.integer("layer_group_size")
        tail = count // group * group
        return ["full_attention" if (i + 1) % group == 0 or i >= tail else "linear_attention" for i in range(count)]
    if "full_attention_interval" in fields or model_type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        every = fields.integer("full_attention_interval", default=4)
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    if "attn_layer_period" in fields:  # Jamba
        period, offset = fields.integer("attn_layer_period"), fields.integer("attn_layer_offset", default=0, least=0)
        return ["full_attention" if i % period == offset else "mamba" for i in range(count)]
    if "attn_layer_indices" in fields:  # Bamba
        where = set(fields.integers("attn_layer_indices"))
        return ["full_attention" if i in where else "mamba" for i in range(count)]
    if model_type.startswith("lfm2"):
        where = set(fields.integers("full_attn_idxs") or range(count))
        return ["full_attention" if i in where else "conv" for i in range(count)]
    return None


def _by_window(fields: ConfigFields, model_type: str, count: int) -> list[str]:
    """Models whose every layer attends: full or through a sliding window."""
    if "sliding_window" not in fields:
        return ["full_attention"] * count
    if model_type.startswith("qwen"):  # Qwen2Config: off unless use_sliding_window, then from max_window_layers on
        first = fields.integer("max_window_layers", default=28, least=0)
        on = fields.flag("use_sliding_window")
        return ["sliding_attention" if on and i >= first else "full_attention" for i in range(count)]
    if model_type == "gpt_oss":  # GptOssConfig: alternating, a window first
        return ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    default = {"gemma3_text": 6, "gemma2": 2, "gemma4_text": 6, "gemma3n_text": 5, "cohere2": 4}.get(model_type)
    every = fields.optional_integer("sliding_window_pattern", "_sliding_window_pattern") or default
    if every is not None:
        kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]
        if model_type == "gemma4_text":  # Gemma4TextConfig: the last layer always sees everything
            kinds[-1] = "full_attention"
        return kinds
    return ["sliding_attention"] * count
