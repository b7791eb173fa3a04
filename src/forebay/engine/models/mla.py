"""Multi-head latent attention in its absorbed form: the pool keeps one latent a token for all heads.

A head's key is W_uk c and its value W_uv c, for the token's compressed vector c. So q . (W_uk c) = (W_uk^T q) . c:
queries are brought into the latent space, attention runs over the latents themselves, and W_uv is applied to what comes
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forebay.engine.checkpoint.rank_weights import LinearPart, shard
from forebay.engine.models.layers import ForwardContext, ModelContext, RowLinear

__all__ = ["LatentAttention", "LatentShape"]

LATENT_NORM_EPS = 1e-6
"""The inner norms' epsilon, whatever the config's ``rms_norm_eps`` (as in the published code)."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of one layer's attention.

    Args:
        heads: over all ranks.
        nope, rope, value: values of a head's plain query, rotary query, and value.
        kv_rank: length of the compressed vector.
        q_rank: length of the compressed query; None: queries are not compressed.
        scale: of the scores, yarn's magnitude included.
        interleaved: rotary pairs are neighbours (2i, 2i + 1); False: halves.
        wide_rope: rotate in fp32 and round once (DeepSeek-V2); False: round each product.
    """

    heads: int
    nope: int
    rope: int
    value: int
    kv_rank: int
    q_rank: int | None
    scale: float
    interleaved: bool = True
    wide_rope: bool = False


class LatentAttention:
    """A block for ``decoder.Decoder``.

    Args:
        build: the context.
        name: the module's name, such as ``model.layers.0.self_attn``.
        shape: sizes.
        group: the layer group whose batch it uses.
    """

    def __init__(self, build: ModelContext, name: str, shape: LatentShape, group: int) -> None:
        comm, weights = build.comm, build.weights
        first, last = shard(shape.heads, comm.rank, comm.size, what="attention heads")
        query = shape.nope + shape.rope
        rows = (first * query, last * query)
        self.q_a = self.q_norm = None
        if shape.q_rank is None:
            self.q = weights.linear([LinearPart(f"{name}.q_proj", rows)])
        else:
            self.q_a = weights.linear([LinearPart(f"{name}.q_a_proj")])
            self.q_norm = weights.tensor(f"{name}.q_a_layernorm.weight")
            self.q = weights.linear([LinearPart(f"{name}.q_b_proj", rows)])
        self.kv_a = weights.linear([LinearPart(f"{name}.kv_a_proj_with_mqa")])
        self.kv_norm = weights.tensor(f"{name}.kv_a_layernorm.weight")
        self._absorb(build, name, shape, first, last)
        cols = (first * shape.value, last * shape.value)
        self.out = RowLinear(build, weights.linear([LinearPart(f"{name}.o_proj")], cols=cols, bias=comm.rank == 0))
        self.shape, self.group, self.heads = shape, group, last - first
        self._backend = build.backend
        self._register(build)
        self.pool = self.cos = self.sin = torch.empty(0)

    def _absorb(self, build: ModelContext, name: str, shape: LatentShape, first: int, last: int) -> None:
        """Split ``kv_b_proj`` into each head's W_uk^T (kv_rank, nope) and W_uv (value, kv_rank), dense."""
        each = shape.nope + shape.value
        both = build.weights.dense(LinearPart(f"{name}.kv_b_proj", (first * each, last * each)))
        heads = both.view(last - first, each, shape.kv_rank)
        self.to_latent = [build.backend.pack_linear(head[: shape.nope].t().contiguous()) for head in heads]
        self.to_value = [build.backend.pack_linear(head[shape.nope :].contiguous()) for head in heads]
        build.weights.nbytes += sum(packed.nbytes for packed in self.to_latent + self.to_value)

    def _register(self, build: ModelContext) -> None:
        ws, dtype, shape, heads = build.workspace, build.dtype, self.shape, self.heads
        latent = shape.kv_rank + shape.rope
        self._q_a = ws.register("q_a", (shape.q_rank or 1,), dtype)
        self._q_normed = ws.register("q_normed", (shape.q_rank or 1,), dtype)
        self._q = ws.register("q", (heads * (shape.nope + shape.rope),), dtype)
        self._kv = ws.register("kv", (latent,), dtype)
        self._latent = ws.register("latent", (latent,), dtype)
        self._nope = ws.register("nope", (heads, shape.nope), dtype)
        self._absorbed = ws.register("absorbed", (shape.kv_rank,), dtype, heads)
        self._query = ws.register("query", (heads, latent), dtype)
        self._attended = ws.register("attended", (heads, shape.kv_rank), dtype)
        self._values = ws.register("values", (shape.value,), dtype, heads)
        self._flat = ws.register("flat", (heads, shape.value), dtype)
        self._hidden = ws.register("hidden", (self.out.linear.out_features,), dtype)
        # Heads are the "experts" of a grouped product: head h takes rows h, H + h, 2H + h... of (M * H, ...).
        self._rows = ws.constant(
            f"head_rows:{heads}",
            lambda m: torch.arange(m * heads, dtype=torch.int32).view(m, heads).t().reshape(-1).contiguous(),
        )
        self._starts = ws.constant(
            f"head_starts:{heads}", lambda m: torch.arange(0, (heads + 1) * m, m, dtype=torch.int32)
        )

    def bind(self, pools: Sequence[torch.Tensor], rope: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Take this layer's pool, and the rotary tables."""
        self.pool = pools[0]
        self.cos, self.sin = rope

    def write(self, x: torch.Tensor, step: ForwardContext) -> torch.Tensor:
        """Write the rows' latents; returns their queries in the latent space (M, heads, kv_rank + rope), in scratch."""
        if step.rope is None:  # the same for every layer
            positions = step.batches[self.group].positions.long()
            step.rope = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        cos, sin = step.rope
        self._store(x, step, cos, sin)
        return self._queries(x, step, cos, sin)

    def read(self, query: torch.Tensor, step: ForwardContext) -> torch.Tensor:
        """Attend, and project: (M, H) in scratch."""
        views, backend, shape, batch = step.views, self._backend, self.shape, step.batches[self.group]
        attended = views[self._attended]
        backend.latent_attention(query, self.pool, batch, shape.scale, shape.kv_rank, attended)
        values = views[self._values]
        flat_in = attended.view(-1, shape.kv_rank)
        backend.grouped_linear(flat_in, self.to_value, views[self._rows], views[self._starts], values)
        flat = views[self._flat]
        flat.copy_(values.view(self.heads, -1, shape.value).transpose(0, 1))
        hidden = views[self._hidden]
        self.out(flat.view(-1, self.heads * shape.value), hidden, views)
        return hidden

    def _store(self, x: torch.Tensor, step: ForwardContext, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Write this step's latents: the normed compressed vector, then the rotated key."""
        views, backend, rank = step.views, self._backend, self.shape.kv_rank
        kv, latent = views[self._kv], views[self._latent]
        backend.linear(x, self.kv_a, kv)
        backend.rms_norm(kv[:, :rank], self.kv_norm, LATENT_NORM_EPS, latent[:, :rank])
        self._rotate(kv[:, None, rank:], cos, sin, latent[:, None, rank:])
        backend.latent_store(latent, step.batches[self.group], self.pool)

    def _queries(self, x: torch.Tensor, step: ForwardContext, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Queries in the latent space, (M, heads, kv_rank + rope)."""
        views, backend, shape, heads = step.views, self._backend, self.shape, self.heads
        if self.q_a is not None and self.q_norm is not None:
            q_a, normed = views[self._q_a], views[self._q_normed]
            backend.linear(x, self.q_a, q_a)
            backend.rms_norm(q_a, self.q_norm, LATENT_NORM_EPS, normed)
            x = normed
        q = views[self._q]
        backend.linear(x, self.q, q)
        split = q.view(-1, heads, shape.nope + shape.rope)
        nope, absorbed, query = views[self._nope], views[self._absorbed], views[self._query]
        nope.copy_(split[:, :, : shape.nope])
        backend.grouped_linear(
            nope.view(-1, shape.nope), self.to_latent, views[self._rows], views[self._starts], absorbed
        )
        query[:, :, : shape.kv_rank] = absorbed.view(heads, -1, shape.kv_rank).transpose(0, 1)
        self._rotate(split[:, :, shape.nope :], cos, sin, query[:, :, shape.kv_rank :])
        return query

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
        """Rotate x (M, heads, rope) into ``out``, pairs de-interleaved: queries and keys alike,
        so scores are the same.
        """
        if self.shape.wide_rope:
            x = x.float()
        half = self.shape.rope // 2
        if self.shape.interleaved:
            first, second = x[..., 0::2], x[..., 1::2]
        else:
            first, second = x[..., :half], x[..., half:]
        out[..., :half] = first * cos - second * sin
        out[..., half:] = second * cos + first * sin
