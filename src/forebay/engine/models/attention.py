"""Grouped-query attention over the paged pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forebay.engine.checkpoint.rank_weights import LinearPart, shard
from forebay.engine.models.layers import ForwardContext, ModelContext, RowLinear

__all__ = ["Attention", "AttentionShape", "QKNorm"]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads over all ranks, and what is done with the scores."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMSNorm of each query and key head before the rotation (Qwen3, Gemma 3)."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float
    gemma: bool = False


class Attention:
    """qkv product, norms, rotation and KV write, attention, output product.

    Args:
        build: the context.
        name: the module's name, such as ``model.layers.0.self_attn``.
        shape: heads over all ranks.
        group: the layer group whose batch it uses.
        norm: query and key norms.
    """

    def __init__(
        self, build: ModelContext, name: str, shape: AttentionShape, group: int, norm: QKNorm | None = None
    ) -> None:
        comm, weights, dim = build.comm, build.weights, shape.head_dim
        first, last = shard(shape.heads, comm.rank, comm.size, what="attention heads")
        part = build.groups[group].parts[0]
        kv_heads, kv_first = part.heads_per_rank(comm.size), part.first_head(comm.rank, comm.size)
        heads = last - first
        q_rows, kv_rows = (first * dim, last * dim), (kv_first * dim, (kv_first + kv_heads) * dim)
        self.qkv = weights.linear(
            [
                LinearPart(f"{name}.q_proj", q_rows),
                LinearPart(f"{name}.k_proj", kv_rows),
                LinearPart(f"{name}.v_proj", kv_rows),
            ]
        )
        self.out = RowLinear(build, weights.linear([LinearPart(f"{name}.o_proj")], cols=q_rows, bias=comm.rank == 0))
        self.shape, self.group, self.norm = shape, group, norm
        self._backend = build.backend
        ws, width = build.workspace, (heads + 2 * kv_heads) * dim
        self._qkv = ws.register("qkv", (width,), build.dtype)
        self._q = ws.derive("q", self._qkv, lambda t: t[:, : heads * dim].view(-1, heads, dim))
        self._k = ws.derive(
            "k", self._qkv, lambda t: t[:, heads * dim : (heads + kv_heads) * dim].view(-1, kv_heads, dim)
        )
        self._v = ws.derive("v", self._qkv, lambda t: t[:, (heads + kv_heads) * dim :].view(-1, kv_heads, dim))
        self._flat = ws.register("attended", (heads * dim,), build.dtype)
        self._attended = ws.derive("heads", self._flat, lambda t: t.view(-1, heads, dim))
        self._hidden = ws.register("hidden", (self.out.linear.out_features,), build.dtype)
        self.k_pool = self.v_pool = self.cos = self.sin = torch.empty(0)

    def bind(self, pools: Sequence[torch.Tensor], rope: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Take this layer's pools, and the rotary tables."""
        self.k_pool, self.v_pool = pools
        self.cos, self.sin = rope

    def write(self, x: torch.Tensor, step: ForwardContext) -> torch.Tensor:
        """Write the rows' keys and values; returns their queries (M, heads, head_dim), rotated, in scratch."""
        views, backend, batch = step.views, self._backend, step.batches[self.group]
        q, k = views[self._q], views[self._k]
        backend.linear(x, self.qkv, views[self._qkv])
        norm = self.norm
        if norm is not None:
            backend.rms_norm(q, norm.q, norm.eps, q, gemma=norm.gemma)
            backend.rms_norm(k, norm.k, norm.eps, k, gemma=norm.gemma)
        backend.rope_store(q, k, views[self._v], self.cos, self.sin, batch, self.k_pool, self.v_pool)
        return q

    def read(self, q: torch.Tensor, step: ForwardContext) -> torch.Tensor:
        """Attend, and project: (M, H) in scratch."""
        views, shape = step.views, self.shape
        self._backend.attention(
            q,
            self.k_pool,
            self.v_pool,
            step.batches[self.group],
            shape.scale,
            views[self._attended],
            window=shape.window,
            softcap=shape.softcap,
        )
        hidden = views[self._hidden]
        self.out(views[self._flat], hidden, views)
        return hidden
