"""DeepSeek-V2 and V3, Kimi-K2, and the language model of Kimi-K2.5: latent attention and a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forebay.engine.models.decoder import Decoder, Layer
from forebay.engine.models.layers import Embedding, ForwardContext, LMHead, ModelContext
from forebay.engine.models.mla import LatentAttention, LatentShape
from forebay.engine.models.mlp import GatedMLP, activation_of
from forebay.engine.models.moe import ExpertShape, MixtureOfExperts
from forebay.engine.models.rotary import RopeSettings, rope_settings, yarn_mscale
from forebay.engine.models.routing import Router, group_limited, noaux_tc, softmax_top_k
from forebay.engine.models.tensor_parallel_sizes import check_ranks
from forebay.errors import UsageError

__all__ = ["DeepseekConfig", "build_deepseek", "read_deepseek_v2", "read_deepseek_v3"]


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts; ``method`` is the config's ``topk_method``."""

    method: str
    groups: int
    kept_groups: int
    normalise: bool
    scale: float


@dataclass(frozen=True)
class DeepseekConfig:
    """What the decoder needs of ``config.json``."""

    vocab_size: int
    layers: int
    attention: LatentShape
    intermediate: int
    dense_layers: int
    experts: ExpertShape
    shared_intermediate: int
    routing: Routing
    eps: float
    activation: str
    tied: bool
    rope: RopeSettings


def read_deepseek_v2(config: Mapping[str, Any], *, tp: int = 1) -> DeepseekConfig:
    """DeepSeek-V2: softmax scores, rotation in fp32."""
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise UsageError(f"config.json has topk_method {method!r}", fix="Forebay has greedy and group_limited_greedy")
    return _read(config, tp, method, wide_rope=True)


def read_deepseek_v3(config: Mapping[str, Any], *, tp: int = 1) -> DeepseekConfig:
    """DeepSeek-V3 and Kimi-K2: sigmoid scores with a selection bias."""
    method, scoring = config.get("topk_method") or "noaux_tc", config.get("scoring_func") or "sigmoid"
    if method != "noaux_tc" or scoring != "sigmoid":
        raise UsageError(
            f"config.json has topk_method {method!r} and scoring_func {scoring!r}",
            fix="Forebay has noaux_tc with sigmoid",
        )
    return _read(config, tp, method, wide_rope=False)


def _read(config: Mapping[str, Any], tp: int, method: str, *, wide_rope: bool) -> DeepseekConfig:
    heads, rope_dim = int(config["num_attention_heads"]), int(config["qk_rope_head_dim"])
    nope, value = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
    activation = config.get("hidden_act", "silu")
    activation_of(activation)
    rope = rope_settings(config, rope_dim)
    q_rank = config.get("q_lora_rank")
    expert_width = int(config["moe_intermediate_size"])
    widths = {"MLP columns": int(config["intermediate_size"]), "expert columns": expert_width}
    check_ranks(tp, heads=heads, kv_heads=None, widths=widths)
    return DeepseekConfig(
        vocab_size=int(config["vocab_size"]),
        layers=int(config["num_hidden_layers"]),
        attention=LatentShape(
            heads=heads,
            nope=nope,
            rope=rope_dim,
            value=value,
            kv_rank=int(config["kv_lora_rank"]),
            q_rank=int(q_rank) if q_rank else None,
            scale=_score_scale(nope + rope_dim, rope),
            interleaved=bool(config.get("rope_interleave", True)),
            wide_rope=wide_rope,
        ),
        intermediate=int(config["intermediate_size"]),
        dense_layers=int(config.get("first_k_dense_replace") or 0),
        experts=ExpertShape(
            count=int(config.get("n_routed_experts") or config["num_local_experts"]),
            per_token=int(config["num_experts_per_tok"]),
            intermediate=expert_width,
            activation=activation,
            wide_logits=True,
        ),
        shared_intermediate=expert_width * int(config.get("n_shared_experts") or 0),
        routing=Routing(
            method=method,
            groups=int(config.get("n_group") or 1),
            kept_groups=int(config.get("topk_group") or 1),
            normalise=bool(config.get("norm_topk_prob", True)),
            scale=float(config.get("routed_scaling_factor", 1.0)),
        ),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=activation,
        tied=bool(config.get("tie_word_embeddings", False)),
        rope=rope,
    )


def _score_scale(query_dim: int, rope: RopeSettings) -> float:
    """1 / sqrt(query_dim), times the square of yarn's magnitude for all dimensions."""
    scale = float(query_dim**-0.5)
    every = rope.values.get("mscale_all_dim")
    if rope.rope_type != "default" and every:
        scale *= yarn_mscale(float(rope.values["factor"]), float(every)) ** 2
    return scale


def build_deepseek(build: ModelContext, config: DeepseekConfig) -> Decoder:
    """Load the decoder."""
    weights = build.weights
    embedding = Embedding(build, "model.embed_tokens", config.vocab_size, output="lm_head", tied=config.tied)
    layers = []
    for index in range(config.layers):
        name = f"model.layers.{index}"
        layers.append(
            Layer(
                LatentAttention(build, f"{name}.self_attn", config.attention, build.group_of(index)),
                _mlp(build, config, index, f"{name}.mlp"),
                weights.tensor(f"{name}.input_layernorm.weight"),
                weights.tensor(f"{name}.post_attention_layernorm.weight"),
            )
        )
    return Decoder(
        build,
        rope=[config.rope] * len(build.groups),
        rope_dtype=torch.float32 if config.attention.wide_rope else build.dtype,
        layers=layers,
        embedding=embedding,
        head=LMHead(build, "lm_head", config.vocab_size, embedding),
        final_norm=weights.tensor("model.norm.weight"),
        eps=config.eps,
    )


def _mlp(
    build: ModelContext, config: DeepseekConfig, index: int, name: str
) -> Callable[[torch.Tensor, ForwardContext], torch.Tensor]:
    if index < config.dense_layers:
        return GatedMLP(build, name, config.intermediate, config.activation)
    shared = (f"{name}.shared_experts", config.shared_intermediate) if config.shared_intermediate else None
    return MixtureOfExperts(build, name, config.experts, _router(build, config, name), shared=shared)


def _router(build: ModelContext, config: DeepseekConfig, name: str) -> Router:
    routing, k = config.routing, config.experts.per_token
    if routing.method == "greedy":
        return softmax_top_k(k, normalise=False, scale=routing.scale)
    if routing.method == "group_limited_greedy":
        return group_limited(k, routing.groups, routing.kept_groups, scale=routing.scale)
    bias = build.weights.tensor(f"{name}.gate.e_score_correction_bias", dtype=torch.float32)
    return noaux_tc(
        k,
        routing.groups,
        routing.kept_groups,
        np.ascontiguousarray(bias.numpy()),
        normalise=routing.normalise,
        scale=routing.scale,
    )
