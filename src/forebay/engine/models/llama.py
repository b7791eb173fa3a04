"""Llama, Mistral, Qwen2 and Qwen3 (dense): one decoder, four configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forebay.engine.models.attention import Attention, AttentionShape, QKNorm
from forebay.engine.models.decoder import Decoder, Layer
from forebay.engine.models.layers import Embedding, ForwardContext, LMHead, ModelContext
from forebay.engine.models.mlp import GatedMLP, activation_of
from forebay.engine.models.rotary import RopeSettings, rope_settings
from forebay.engine.models.tensor_parallel_sizes import check_ranks

__all__ = ["LlamaConfig", "build_llama", "read_llama_config"]

MLP = Callable[[torch.Tensor, ForwardContext], torch.Tensor]


@dataclass(frozen=True)
class LlamaConfig:
    """What the decoder needs of ``config.json``."""

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
    rope: RopeSettings

    def attention(self, window: int | None) -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5, window)


def read_llama_config(config: Mapping[str, Any], *, tp: int = 1) -> LlamaConfig:
    """Read and check the config of any model of this shape.

    Raises:
        UsageError: what we do not have, or a number of ranks that does not divide the heads.
    """
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    intermediate = int(config.get("intermediate_size") or 0)
    check_ranks(tp, heads=heads, kv_heads=kv_heads, widths={"MLP columns": intermediate})
    activation_of(config.get("hidden_act", "silu"))
    return LlamaConfig(
        vocab_size=int(config["vocab_size"]),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=config.get("hidden_act", "silu"),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope=rope_settings(config, head_dim),
    )


def build_llama(
    build: ModelContext,
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
    embedding = Embedding(build, "model.embed_tokens", config.vocab_size, output="lm_head", tied=config.tied)
    layers = []
    for index in range(config.layers):
        name = f"model.layers.{index}"
        norm = None
        if qk_norm:
            q, k = (weights.tensor(f"{name}.self_attn.{x}_norm.weight") for x in "qk")
            norm = QKNorm(q, k, config.eps)
        group = build.group_of(index)
        shape = config.attention(build.groups[group].window)
        attention = Attention(build, f"{name}.self_attn", shape, group, norm)
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
        rope=[config.rope] * len(build.groups),
        layers=layers,
        embedding=embedding,
        head=LMHead(build, "lm_head", config.vocab_size, embedding),
        final_norm=weights.tensor("model.norm.weight"),
        eps=config.eps,
        replayable=mlp is None,
    )
