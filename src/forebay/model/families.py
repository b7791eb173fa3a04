"""config.json to ModelGeometry: which fields each model family uses, and the defaults its configuration class fills in.

Field names and defaults are those of the Transformers configuration classes
(``transformers/models/*/configuration_*.py``, 5.19); where a checkpoint relies on a class default (Gemma 3's head
counts), the default is repeated here with its class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.errors import UsageError
from forebay.model.config_fields import ConfigFields
from forebay.model.geometry import DTYPE_BYTES, LayerKind, LayerShape, ModelGeometry, MoeShape
from forebay.model.layer_types import layer_types
from forebay.model.quantization import read_quantization
from forebay.model.recurrent import recurrent_shape

__all__ = ["load_geometry", "read_geometry"]

# Transformers class defaults that released checkpoints rely on (their config.json leaves the field out)
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {  # Gemma3TextConfig
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "gemma4_text": {  # Gemma4TextConfig
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262144,
        "sliding_window": 512,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "gemma3n_text": {  # Gemma3nTextConfig
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 262400,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
        "num_kv_shared_layers": 15,
        "tie_word_embeddings": True,
    },
    "gemma2": {"sliding_window": 4096, "head_dim": 256, "tie_word_embeddings": True},  # Gemma2Config
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},  # GemmaConfig
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},  # GptOssConfig
    "qwen3": {"head_dim": 128},  # Qwen3Config
    "qwen3_moe": {"head_dim": 128},  # Qwen3MoeConfig falls back to hidden/heads, every release states 128
    "qwen3_next": {"head_dim": 256},  # Qwen3NextConfig
    "qwen3_5_text": {"head_dim": 256},  # Qwen3_5TextConfig
    "qwen3_5_moe_text": {"head_dim": 256},  # Qwen3_5MoeTextConfig
}
_TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")


def load_geometry(path: Path) -> ModelGeometry:
    """Read the config.json at ``path``.

    Raises:
        UsageError: it is not there, not JSON, or lacks a field.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file", code="checkpoint_missing") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as JSON: {error}", code="checkpoint_corrupt") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: holds a {type(config).__name__}, an object is needed", code="checkpoint_corrupt")
    return read_geometry(config, str(path))


def read_geometry(config: Mapping[str, Any], source: str = "config.json") -> ModelGeometry:
    """Read a parsed config.json.

    Raises:
        UsageError: a field is missing or wrong, or the layers are of a kind this planner has no arithmetic for.
    """
    top = ConfigFields(config, source)
    text = _text_part(top)
    model_type = text.text("model_type", top.text("model_type", ""))
    fields = ConfigFields({**_CLASS_DEFAULTS.get(model_type, {}), **_given(text.values)}, text.where)
    count = _num_layers(fields)
    heads = fields.integer("num_attention_heads", "n_head")
    hidden = fields.integer("hidden_size", "n_embd", "d_model")
    head_dim = fields.optional_integer("head_dim") or hidden // heads
    kinds = layer_types(fields, model_type, count)
    latent_rank = fields.optional_integer("kv_lora_rank")
    layers = _without_shared(fields, tuple(_layer(fields, model_type, kind, heads, head_dim) for kind in kinds))
    return ModelGeometry(
        architecture=_architecture(top, text),
        model_type=model_type,
        source=source,
        layers=layers,
        hidden_size=hidden,
        intermediate_size=fields.integer(
            "intermediate_size", "ffn_hidden_size", "n_inner", default=4 * hidden, least=0
        ),
        num_heads=heads,
        num_kv_heads=_kv_heads(fields, heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        max_context=fields.integer("max_position_embeddings", "n_positions", "max_seq_len", default=0, least=0),
        dtype=_dtype(top, text),
        tie_embeddings=_tied(top, fields),
        latent_rank=latent_rank,
        query_rank=fields.optional_integer("q_lora_rank"),
        query_head_dim=_query_head_dim(fields, head_dim, latent_rank),
        value_head_dim=fields.optional_integer("v_head_dim") or head_dim,
        moe=_moe(fields, model_type, count),
        quantization=read_quantization(text) or read_quantization(top),
        draft_layers=fields.integer("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0, least=0),
        vision=_vision(top),
    )


def _vision(top: ConfigFields) -> tuple[int, int] | None:
    """The vision tower, with the names Kimi-K2.5 and Qwen give its sizes, and ViT-L's sizes where none is stated."""
    if not isinstance(top.values.get("vision_config"), Mapping):
        return None
    part = top.child("vision_config")
    layers = part.integer("num_hidden_layers", "vt_num_hidden_layers", "depth", default=24)
    return layers, part.integer("hidden_size", "vt_hidden_size", default=1024)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _text_part(top: ConfigFields) -> ConfigFields:
    """The language model's part of a multimodal configuration, however deep (Qwen-Omni: thinker_config.text_config)."""
    for name in _TEXT_PARTS:
        if isinstance(top.values.get(name), Mapping):
            return _text_part(top.child(name))
    return top


def _num_layers(fields: ConfigFields) -> int:
    pattern = fields.values.get("layers_block_type")
    default = len(pattern) if isinstance(pattern, list) else None
    return fields.integer("num_hidden_layers", "n_layer", "num_layers", default=default)


def _architecture(top: ConfigFields, text: ConfigFields) -> str:
    for fields in (top, text):
        names = fields.values.get("architectures")
        if isinstance(names, list) and names:
            return str(names[0])
    return "unknown"


def _dtype(top: ConfigFields, text: ConfigFields) -> str:
    """``dtype`` (Transformers 5) or ``torch_dtype``; where neither is stated, bfloat16,
    as every family read here ships.
    """
    for fields in (text, top):
        for name in ("dtype", "torch_dtype"):
            if name in fields:
                value = fields.text(name).removeprefix("torch.")
                if value not in DTYPE_BYTES:
                    raise UsageError(f"{fields.where}: field {name!r} is {value!r}, known are {', '.join(DTYPE_BYTES)}")
                return value
    return "bfloat16"


def _tied(top: ConfigFields, fields: ConfigFields) -> bool:
    return fields.flag("tie_word_embeddings", top.flag("tie_word_embeddings", False))


def _kv_heads(fields: ConfigFields, heads: int) -> int:
    """KV heads; without the field, one a query head (multi-head attention), as Transformers reads it."""
    return fields.integer("num_key_value_heads", "num_kv_heads", "multi_query_group_num", default=heads)


def _query_head_dim(fields: ConfigFields, head_dim: int, latent_rank: int | None) -> int:
    if latent_rank is None:
        return head_dim
    return fields.integer("qk_nope_head_dim", least=0) + fields.integer("qk_rope_head_dim", least=0)


def _layer(fields: ConfigFields, model_type: str, kind: str, heads: int, head_dim: int) -> LayerShape:
    """One layer's shape from its layer type (Transformers' names)."""
    if kind in ("linear_attention", "mamba", "conv", "hybrid"):
        state = recurrent_shape(fields, model_type)
        if kind != "hybrid":
            return LayerShape(LayerKind.RECURRENT, recurrent=state)
        return LayerShape(LayerKind.FULL, _kv_heads(fields, heads), head_dim, head_dim, recurrent=state)
    if kind in ("mlp", "moe"):
        return LayerShape(LayerKind.SHARED)
    if "kv_lora_rank" in fields and kind == "full_attention":
        latent = fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim")
        index = fields.integer("index_head_dim") if "index_topk" in fields else 0
        return LayerShape(LayerKind.LATENT, 1, latent, 0, index_dim=index)
    kv_heads, value_dim = _kv_heads(fields, heads), fields.optional_integer("v_head_dim") or head_dim
    if kind == "sliding_attention":
        window = fields.integer("sliding_window", "sliding_window_size")
        return LayerShape(LayerKind.SLIDING, kv_heads, head_dim, value_dim, window=window)
    if kind in ("full_attention", "chunked_attention", "attention"):
        wide = fields.optional_integer("global_head_dim")  # Gemma 4: full layers have wider heads, and fewer of them
        full_heads = fields.optional_integer("num_global_key_value_heads") if fields.flag("attention_k_eq_v") else None
        return LayerShape(LayerKind.FULL, full_heads or kv_heads, wide or head_dim, wide or value_dim)
    raise UsageError(
        f"{fields.where}: layers of type {kind!r} ({model_type}): the planner has no arithmetic for them",
        fix="plan a known architecture, or give the server's own log to `forebay plan --from-log`",
        code="unsupported_architecture",
    )


def _without_shared(fields: ConfigFields, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """Gemma 3n and 4: the last ``num_kv_shared_layers`` read the KV of earlier layers and keep none."""
    shared = fields.integer("num_kv_shared_layers", default=0, least=0)
    if not shared:
        return layers
    own = max(0, len(layers) - shared)
    return layers[:own] + tuple(replace(layer, kind=LayerKind.SHARED) for layer in layers[own:])


def _moe(fields: ConfigFields, model_type: str, count: int) -> MoeShape | None:
    """The experts, under the names the families use (Mixtral, Qwen, DeepSeek, GLM, gpt-oss)."""
    experts = fields.optional_integer(
        "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", least=0
    )
    if not experts or (model_type.startswith("gemma4") and not fields.flag("enable_moe_block")):
        return None
    width = fields.integer("moe_intermediate_size", "intermediate_size")
    shared = fields.integer(
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", default=0, least=0
    )
    if not shared:
        shared = fields.integer("n_shared_experts", "num_shared_experts", default=0, least=0) * width
    return MoeShape(
        experts=experts,
        experts_per_token=fields.integer("num_experts_per_tok", "num_experts_per_token", "top_k_experts", default=1),
        expert_intermediate=width,
        shared_intermediate=shared,
        layers=frozenset(_moe_layers(fields, count)),
    )


def _moe_layers(fields: ConfigFields, count: int) -> list[int]:
    kinds = fields.values.get("mlp_layer_types")
    if isinstance(kinds, list) and len(kinds) >= count:
        return [i for i in range(count) if kinds[i] not in ("dense", "mlp")]
    pattern = fields.values.get("layers_block_type") or fields.values.get("hybrid_override_pattern")
    if pattern and any(kind in ("moe", "E") for kind in pattern):
        return [i for i, kind in enumerate(pattern) if kind in ("moe", "E")]
    first = fields.integer("first_k_dense_replace", default=0, least=0)
    step = fields.integer("decoder_sparse_step", "expert_layer_period", "moe_layer_freq", default=1)
    dense = set(fields.integers("mlp_only_layers"))
    offset = fields.integer("expert_layer_offset", default=step - 1 if "decoder_sparse_step" in fields else 0, least=0)
    return [i for i in range(first, count) if i % step == offset % step and i not in dense]
