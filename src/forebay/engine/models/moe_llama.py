"""Mixtral and Qwen3-MoE: the Llama decoder with experts for an MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forebay.engine.models.decoder import Decoder
from forebay.engine.models.layers import ForwardContext, ModelContext
from forebay.engine.models.llama import LlamaConfig, build_llama, read_llama_config
from forebay.engine.models.mlp import GatedMLP
from forebay.engine.models.moe import ExpertNames, ExpertShape, MixtureOfExperts
from forebay.engine.models.routing import softmax_top_k
from forebay.engine.models.tensor_parallel_sizes import check_ranks

__all__ = ["build_mixtral", "build_qwen3_moe", "read_mixtral", "read_qwen3_moe"]

MLP = Callable[[torch.Tensor, ForwardContext], torch.Tensor]


@dataclass(frozen=True)
class MoeConfig:
    """The decoder's config, and its experts'; ``dense_layers`` have an ordinary MLP."""

    decoder: LlamaConfig
    experts: ExpertShape
    normalise: bool
    dense_layers: frozenset[int] = frozenset()


def read_mixtral(config: Mapping[str, Any], *, tp: int = 1) -> MoeConfig:
    """Mixtral: every layer has experts."""
    decoder = read_llama_config(config, tp=tp)
    experts = ExpertShape(
        int(config["num_local_experts"]), int(config["num_experts_per_tok"]), decoder.intermediate, decoder.activation
    )
    return MoeConfig(decoder, experts, True)


def read_qwen3_moe(config: Mapping[str, Any], *, tp: int = 1) -> MoeConfig:
    """Qwen3-MoE: experts every ``decoder_sparse_step`` layers but ``mlp_only_layers``."""
    decoder = read_llama_config(config, tp=tp)
    experts = ExpertShape(
        int(config.get("num_experts") or config["num_local_experts"]),
        int(config["num_experts_per_tok"]),
        int(config["moe_intermediate_size"]),
        decoder.activation,
    )
    check_ranks(tp, heads=decoder.heads, kv_heads=decoder.kv_heads, widths={"expert columns": experts.intermediate})
    only, every = config.get("mlp_only_layers") or (), int(config.get("decoder_sparse_step") or 1)
    dense = frozenset(i for i in range(decoder.layers) if i in only or (i + 1) % every)
    return MoeConfig(decoder, experts, bool(config.get("norm_topk_prob", False)), dense)


def build_mixtral(build: ModelContext, config: MoeConfig) -> Decoder:
    """Load Mixtral."""
    router = softmax_top_k(config.experts.per_token, normalise=True)

    def mlp(index: int, name: str) -> MLP:
        at = name.removesuffix("mlp") + "block_sparse_moe"
        return MixtureOfExperts(build, at, config.experts, router, names=ExpertNames("w1", "w3", "w2"))

    return build_llama(build, config.decoder, mlp=mlp)


def build_qwen3_moe(build: ModelContext, config: MoeConfig) -> Decoder:
    """Load Qwen3-MoE."""
    router = softmax_top_k(config.experts.per_token, normalise=config.normalise)

    def mlp(index: int, name: str) -> MLP:
        if index in config.dense_layers:
            return GatedMLP(build, name, config.decoder.intermediate, config.decoder.activation)
        return MixtureOfExperts(build, name, config.experts, router)

    return build_llama(build, config.decoder, qk_norm=True, mlp=mlp)
