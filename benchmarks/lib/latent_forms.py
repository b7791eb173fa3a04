"""One layer's latent attention for one decoded token, three ways, at a published model's sizes.

absorbed    the cache keeps a latent a token; queries go to the latent space (what the engine does)
naive       the cache keeps every head's keys and values (``attn_impl = "naive"`` of DeepSeek's published code)
expanding   the cache keeps latents, and every step turns all of them into keys and values; only that product is timed
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from forebay.engine.kernels.interface import AttentionBatch, KernelBackend, PackedLinear

__all__ = ["LatentSizes", "compare"]

_PAGE = 16
_COPY_BYTES = 400_000_000
"""Caches and weights rotate through copies of together this size, as a model's layers do: more than any cache holds."""


@dataclass(frozen=True)
class LatentSizes:
    """Of one layer: DeepSeek-V3's and Kimi-K2's, but for the number of heads (128 and 64)."""

    heads: int = 64
    nope: int = 128
    rope: int = 64
    value: int = 128
    rank: int = 512

    @property
    def latent(self) -> int:
        return self.rank + self.rope

    @property
    def scale(self) -> float:
        return float((self.nope + self.rope) ** -0.5)


@dataclass(frozen=True)
class _Layer:
    """Random weights of one layer: keys and values out of a latent, apart for each head and as one matrix."""

    w_uk: torch.Tensor  # (heads, nope, rank)
    w_uv: torch.Tensor  # (heads, value, rank)
    to_latent: list[PackedLinear]
    to_value: list[PackedLinear]
    kv_b: PackedLinear

    @classmethod
    def make(cls, sizes: LatentSizes, backend: KernelBackend) -> _Layer:
        each = sizes.nope + sizes.value
        both = (torch.randn(sizes.heads, each, sizes.rank) * sizes.rank**-0.5).bfloat16()
        w_uk, w_uv = both[:, : sizes.nope], both[:, sizes.nope :]
        return cls(
            w_uk,
            w_uv,
            [backend.pack_linear(head.t().contiguous()) for head in w_uk],
            [backend.pack_linear(head.contiguous()) for head in w_uv],
            backend.pack_linear(both.reshape(-1, sizes.rank)),
        )


def _one_token(context: int, pages: torch.Tensor) -> AttentionBatch:
    return AttentionBatch(
        pages.view(1, -1),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([context], dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        torch.tensor([context - 1], dtype=torch.int32),
        _PAGE,
    )


def _paged(values: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """(context, heads, dim) -> a pool (pages, heads, page size,
    dim) whose page ``pages[i]`` holds tokens i * size...
    """
    context, heads, dim = values.shape
    pool = torch.empty(context // _PAGE, heads, _PAGE, dim, dtype=values.dtype)
    pool[pages.long()] = values.view(-1, _PAGE, heads, dim).transpose(1, 2)
    return pool


class _Forms:
    """The calls to time; what they share is made once."""

    def __init__(self, backend: KernelBackend, sizes: LatentSizes, context: int) -> None:
        self.backend, self.sizes = backend, sizes
        heads, bf16 = sizes.heads, torch.bfloat16
        pages = torch.randperm(context // _PAGE).int()
        self.batch = _one_token(context, pages)
        latents = torch.randn(context, sizes.latent).to(bf16)
        self.query = torch.randn(1, heads, sizes.nope + sizes.rope).to(bf16)
        layer_bytes = 2 * sizes.latent * context
        self.latent_pools = [_paged(latents.unsqueeze(1), pages) for _ in range(max(1, _COPY_BYTES // layer_bytes))]
        self.layers = [_Layer.make(sizes, backend) for _ in range(4)]
        layer = self.layers[0]
        c, k_rope = latents[:, : sizes.rank].float(), latents[:, sizes.rank :]
        keys = torch.einsum("tr,hnr->thn", c, layer.w_uk.float()).to(bf16)
        self.values = _paged(torch.einsum("tr,hvr->thv", c, layer.w_uv.float()).to(bf16), pages)
        rotary = k_rope.unsqueeze(1).expand(-1, heads, -1)
        self.keys = _paged(torch.cat([keys, rotary], dim=-1), pages)
        self.rows = torch.arange(heads, dtype=torch.int32)
        self.starts = torch.arange(heads + 1, dtype=torch.int32)
        self.nope = self.query[0, :, : sizes.nope].contiguous()
        self.absorbed_query = torch.empty(heads, sizes.rank, dtype=bf16)
        self.latent_query = torch.empty(1, heads, sizes.latent, dtype=bf16)
        self.latent_out = torch.empty(1, heads, sizes.rank, dtype=bf16)
        self.out = torch.empty(heads, sizes.value, dtype=bf16)
        self.naive_out = torch.empty(1, heads, sizes.value, dtype=bf16)
        self.new_latent = latents[-1:, : sizes.rank].contiguous()
        self.new_kv = torch.empty(1, heads * (sizes.nope + sizes.value), dtype=bf16)
        self.all_latents = latents[:, : sizes.rank].contiguous()
        self.all_kv = torch.empty(context, heads * (sizes.nope + sizes.value), dtype=bf16)

    def absorbed(self, turn: int) -> None:
        """Queries to the latent space, attention over latents, values out of what it finds."""
        backend, sizes = self.backend, self.sizes
        layer, pool = self.layers[turn % len(self.layers)], self.latent_pools[turn % len(self.latent_pools)]
        backend.grouped_linear(self.nope, layer.to_latent, self.rows, self.starts, self.absorbed_query)
        self.latent_query[0, :, : sizes.rank] = self.absorbed_query
        self.latent_query[:, :, sizes.rank :] = self.query[:, :, sizes.nope :]
        backend.latent_attention(self.latent_query, pool, self.batch, sizes.scale, sizes.rank, self.latent_out)
        backend.grouped_linear(self.latent_out[0], layer.to_value, self.rows, self.starts, self.out)

    def naive(self, turn: int) -> None:
        """The new token's keys and values, and attention over every head's own."""
        layer = self.layers[turn % len(self.layers)]
        self.backend.linear(self.new_latent, layer.kv_b, self.new_kv)
        self.backend.attention(self.query, self.keys, self.values, self.batch, self.sizes.scale, self.naive_out)

    def expanding(self, turn: int) -> None:
        """All tokens' keys and values, anew."""
        self.backend.linear(self.all_latents, self.layers[turn % len(self.layers)].kv_b, self.all_kv)

    def difference(self) -> float:
        """Between the two forms' answers, relative to their size."""
        self.absorbed(0)
        self.naive(0)
        ours, theirs = self.out.float(), self.naive_out[0].float()
        return float((ours - theirs).norm() / theirs.norm())


def compare(backend: KernelBackend, context: int, rounds: int, sizes: LatentSizes | None = None) -> dict[str, float]:
    """Median seconds of each form, in turns, and how far the answers of the first two are apart."""
    sizes = sizes or LatentSizes()
    torch.manual_seed(0)
    with torch.inference_mode():
        forms = _Forms(backend, sizes, context)
        calls: dict[str, Callable[[int], None]] = {
            "absorbed": forms.absorbed, "naive": forms.naive, "expanding": forms.expanding,
        }  # fmt: skip
        taken: dict[str, list[float]] = {name: [] for name in calls}
        difference = forms.difference()
        for turn in range(rounds):
            for name, call in calls.items():
                for again in range(1 if name == "expanding" else 5):
                    began = time.perf_counter()
                    call(turn * 5 + again)
                    taken[name].append(time.perf_counter() - began)
    cached = 2 * context * sizes.heads * (sizes.nope + sizes.rope + sizes.value)
    return {
        **{f"{name}_s": statistics.median(times) for name, times in taken.items()},
        "difference": difference,
        "absorbed_cache_bytes": 2 * context * sizes.latent,
        "naive_cache_bytes": cached,
    }
