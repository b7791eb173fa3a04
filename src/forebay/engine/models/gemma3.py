"""Gemma 3 (text): sliding-window layers between full ones, four norms a layer, scaled embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forebay.engine.memory.device_pool import DevicePool
from forebay.engine.models.attention import Attention, AttentionShape, QKNorm
from forebay.engine.models.layers import Embedding, ForwardContext, LMHead, ModelContext
from forebay.engine.models.llama import LlamaConfig, read_llama_config
from forebay.engine.models.mlp import GatedMLP
from forebay.engine.models.rotary import RopeSettings, rope_settings, rope_tables
from forebay.errors import UsageError

__all__ = ["Gemma3Config", "Gemma3Decoder", "read_gemma3_config"]

_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Gemma3Config:
    """The Llama part of the config, and what Gemma adds; ``local`` are the sliding layers' rotary settings."""

    base: LlamaConfig
    local: RopeSettings
    scale: float
    softcap: float | None
    final_softcap: float | None


def read_gemma3_config(config: Mapping[str, Any], *, tp: int = 1) -> Gemma3Config:
    """Read and check.

    Raises:
        UsageError: what we do not have (bidirectional attention; see also ``read_llama_config``).
    """
    if config.get("use_bidirectional_attention"):
        raise UsageError("config.json has use_bidirectional_attention: Forebay runs causal models only")
    activation = config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh"
    filled = {"head_dim": 256, "tie_word_embeddings": True, **config, "hidden_act": activation}
    head_dim = int(filled["head_dim"])
    filled["rope_parameters"] = _rope(config, "full_attention", "rope_theta", 1_000_000.0)
    local = {**config, "rope_parameters": _rope(config, "sliding_attention", "rope_local_base_freq", 10_000.0)}
    return Gemma3Config(
        base=read_llama_config(filled, tp=tp),
        local=rope_settings(local, head_dim),
        scale=float(config.get("query_pre_attn_scalar") or 256) ** -0.5,
        softcap=config.get("attn_logit_softcapping"),
        final_softcap=config.get("final_logit_softcapping"),
    )


def _rope(config: Mapping[str, Any], kind: str, old_key: str, default: float) -> dict[str, Any]:
    """One layer type's settings: of ``rope_parameters``, or the older keys (whose scaling is for full layers only)."""
    given = (config.get("rope_parameters") or {}).get(kind)
    if given is None:
        given = (config.get("rope_scaling") or {}) if kind == "full_attention" else {}
    return {"rope_type": "default", "rope_theta": config.get(old_key) or default, **given}


class _Layer:
    """One layer: norms around both blocks, each added to the residual after its own norm."""

    def __init__(self, build: ModelContext, config: Gemma3Config, index: int) -> None:
        base, weights, name = config.base, build.weights, f"model.layers.{index}"
        group = build.group_of(index)
        shape = AttentionShape(
            base.heads, base.kv_heads, base.head_dim, config.scale, build.groups[group].window, config.softcap
        )
        q, k = (weights.tensor(f"{name}.self_attn.{x}_norm.weight") for x in "qk")
        self.attention = Attention(build, f"{name}.self_attn", shape, group, QKNorm(q, k, base.eps, gemma=True))
        self.mlp = GatedMLP(build, f"{name}.mlp", base.intermediate, base.activation)
        self.norms = [weights.tensor(f"{name}.{norm}.weight") for norm in _NORMS]


class Gemma3Decoder:
    """Implements ``decoder.Model``."""

    replayable = False

    def __init__(self, build: ModelContext, config: Gemma3Config) -> None:
        base = config.base
        self.groups, self.vocab_size = build.groups, base.vocab_size
        self._config, self._backend, self._dtype = config, build.backend, build.dtype
        self.embedding = Embedding(
            build, "model.embed_tokens", base.vocab_size, output="lm_head", tied=base.tied, scale=base.hidden**0.5
        )
        self.layers = [_Layer(build, config, index) for index in range(base.layers)]
        self.final_norm = build.weights.tensor("model.norm.weight")
        self.head = LMHead(build, "lm_head", base.vocab_size, self.embedding)
        ws = build.workspace
        self._x = ws.register("x", (base.hidden,), build.dtype)
        self._residual = ws.register("residual", (base.hidden,), build.dtype)

    def bind(self, pool: DevicePool, max_positions: int) -> None:
        """Take the pool, and make the rotary tables: the local ones for sliding layers."""
        tables = [
            rope_tables(self._config.base.rope if g.window is None else self._config.local, max_positions, self._dtype)
            for g in self.groups
        ]
        for index, group in enumerate(self.groups):
            for layer, pools in zip(group.layers, pool.tensors[index]):
                self.layers[layer].attention.bind(pools, tables[index])

    def forward(self, step: ForwardContext) -> torch.Tensor | None:
        """See ``decoder.Model.forward``."""
        views, wait = step.views, step.wait
        x, residual = views[self._x], views[self._residual]
        self.embedding(step.tokens, residual, views)
        for index, layer in enumerate(self.layers):
            if wait is not None:
                wait(index)
            self._norm(residual, layer.norms[0], x)
            self._add(layer.attention.read(layer.attention.write(x, step), step), layer.norms[1], x, residual)
            self._norm(residual, layer.norms[2], x)
            self._add(layer.mlp(x, step), layer.norms[3], x, residual)
        if step.last_rows is not None:
            if step.final is None:
                return None
            residual = residual.index_select(0, step.last_rows)
            step = step.final
            x = step.views[self._x]
        self._norm(residual, self.final_norm, x)
        logits = self.head(x, step.views)
        cap = self._config.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        self._backend.rms_norm(x, weight, self._config.base.eps, out, gemma=True)

    def _add(self, block: torch.Tensor, weight: torch.Tensor, scratch: torch.Tensor, residual: torch.Tensor) -> None:
        """residual += norm(block)."""
        self._norm(block, weight, scratch)
        residual.add_(scratch)
