"""Llama, Mistral, Qwen2 and Qwen3 (dense): one decoder, four configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forebay.engine.models.attention import Attention, AttentionShape, QKNorm, kv_parts
from forebay.engine.models.decoder import Decoder, Layer, group_layers
from forebay.engine.models.mlp import GatedMLP, activation_of
from forebay.engine.models.parts import Build, Embedding, Head, Step
from forebay.engine.runtime.rotary import RopeSettings, rope_settings
from forebay.engine.runtime.weights import shard
from forebay.planning.kv_spec import LayerGroup

__all__ = ["LlamaConfig", "build_llama", "layer_windows", "read_llama_config"]

MLP = Callable[[torch.Tensor, Step], torch.Tensor]


@dataclass(frozen=True)
class LlamaConfig:
    """What the decoder needs of ``config.json``; ``windows`` has one entry a layer (None: full attention)."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    activation: str
    tied: bool
    windows: tuple[int | None, ...]
    rope: RopeSettings

    def attention(self, window: int | None) -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5, window)

    def groups(self, value_bytes: int) -> tuple[tuple[LayerGroup, ...], list[int]]:
        def group(window: int | None) -> LayerGroup:
            parts = kv_parts(self.attention(window), value_bytes)
            return LayerGroup("full" if window is None else "sliding", (), parts)

        return group_layers(self.windows, group)


def layer_windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Each layer's window: ``layer_types`` if given, else Mistral's (all layers) or Qwen's (from ``max_window_layers``)."""
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", True):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if "use_sliding_window" in config:
        full = config.get("max_window_layers", 28)
        return tuple(window if i >= full else None for i in range(layers))
    return (window,) * layers


def read_llama_config(config: Mapping[str, Any], *, tp: int = 1) -> LlamaConfig:
    """Read and check the config of any model of this shape.

    Raises:
        UsageError: what we do not have, or a number of ranks that does not divide the heads.
    """
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    shard(heads, 0, tp, what="attention heads")
    if kv_heads >= tp:
        shard(kv_heads, 0, tp, what="KV heads")
    else:
        shard(tp, 0, kv_heads, what="ranks over the KV heads")
    activation_of(config.get("hidden_act", "silu"))
    return LlamaConfig(
        vocab_size=int(config["vocab_size"]),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=int(config.get("intermediate_size") or 0),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=config.get("hidden_act", "silu"),
        tied=bool(config.get("tie_word_embeddings", False)),
        windows=layer_windows(config, layers),
        rope=rope_settings(config, head_dim),
    )


def build_llama(
    build: Build,
    config: LlamaConfig,
    *,
    qk_norm: bool = False,
    mlp: Callable[[int, str], MLP] | None = None,
) -> Decoder:
    """Load the decoder.

    Args:
        build: the context.
        config: the checked config.
        qk_norm: whether queries and keys are normed (Qwen3).
        mlp: makes layer i's MLP from its name; None: the dense gated one.
    """
    weights = build.weights
    groups, group_of = config.groups(build.dtype.itemsize)
    embedding = Embedding(build, "model.embed_tokens", config.vocab_size)
    layers = []
    for index in range(config.layers):
        name = f"model.layers.{index}"
        norm = None
        if qk_norm:
            q, k = (weights.tensor(f"{name}.self_attn.{x}_norm.weight") for x in "qk")
            norm = QKNorm(q, k, config.eps)
        attention = Attention(
            build, f"{name}.self_attn", config.attention(config.windows[index]), group_of[index], norm
        )
        make_mlp = mlp or (lambda _, mlp_name: GatedMLP(build, mlp_name, config.intermediate, config.activation))
        layers.append(
            Layer(
                attention,
                make_mlp(index, f"{name}.mlp"),
                weights.tensor(f"{name}.input_layernorm.weight"),
                weights.tensor(f"{name}.post_attention_layernorm.weight"),
            )
        )
    return Decoder(
        build,
        groups=groups,
        rope=[config.rope] * len(groups),
        layers=layers,
        embedding=embedding,
        head=Head(build, "lm_head", config.vocab_size, embedding, tied=config.tied),
        final_norm=weights.tensor("model.norm.weight"),
        eps=config.eps,
    )
