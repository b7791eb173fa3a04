"""The operations that models consist of, as one interface with two back ends: native (C++) and torch (the fallback).

All tensors are contiguous CPU tensors (row-major) unless said otherwise; M is the number of token rows in the step.
Every operation computes each row from that row alone, in a fixed order: the same row gives the same bits whatever the
other rows of the batch (native back end; the fallback is equal within rounding). Activations are bf16 or fp32 (the
model's dtype), sums are fp32, and results are rounded once on the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["AttentionBatch", "KernelBackend", "PackedLinear", "ReadRows"]

ReadRows = Callable[[int, int], dict[str, torch.Tensor]]
"""Rows [a, b) of a weight as stored."""


class PackedLinear(Protocol):
    """A weight matrix in the back end's own layout; ``out_features`` x ``in_features``."""

    out_features: int
    in_features: int
    nbytes: int


@dataclass(slots=True)
class AttentionBatch:
    """The queries and keys of each sequence, for one layer group in one step.

    Sequence i has query rows ``query_start[i]`` .. ``query_start[i + 1]`` of the step's M rows; they are its last
    tokens: the row r of sequence i sits at absolute position ``context_len[i] - (query_start[i + 1] - r)``.

    Args:
        page_table: int32 (num_seqs, max_pages), page number -> device page; -1 where nothing may be read.
        query_start: int32 (num_seqs + 1,).
        context_len: int32 (num_seqs,), keys per sequence, including those of this step.
        slots: int64 (M,), page * page_size + offset: where each row's KV is written.
        positions: int32 (M,), each row's absolute position.
        page_size: token slots per page.
    """

    page_table: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    page_size: int


class KernelBackend(Protocol):
    """One back end. ``out`` is written in place."""

    name: str

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """Pack ``weight`` (N, K), bf16 or fp32; the caller may drop it afterwards."""

    def pack_quantized(self, scheme: str, tensors: dict[str, torch.Tensor], shape: tuple[int, int]) -> PackedLinear:
        """Pack a quantized weight so that products read the packed bytes; no dequantized copy is kept.

        Schemes: ``int4_g32`` (compressed-tensors pack-quantized, symmetric, group 32: ``weight_packed`` int32
        (N, K/8), ``weight_scale`` bf16 (N, K/32)), ``fp8_block`` (``weight`` float8_e4m3fn (N, K), ``weight_scale_inv``
        fp32 (ceil(N/128), ceil(K/128))), ``int8`` (``weight`` int8 (N, K), ``weight_scale`` (N, 1)).
        """

    def pack_rows(
        self, scheme: str | None, shape: tuple[int, int], read: ReadRows, bias: torch.Tensor | None = None
    ) -> PackedLinear:
        """Pack a weight that is read as it is packed, so that no second copy of it is ever held.

        Args:
            scheme: as in ``pack_quantized``; None: dense.
            shape: (N, K).
            read: rows [a, b) -> their tensors, as ``pack_quantized`` takes them; a dense weight's is ``weight``. It is
                called with ascending rows, ``a`` a multiple of 128, and what it returns is of no use after the next
                call.
            bias: of a dense weight.
        """

    def linear(self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor) -> None:
        """out (M, N) = x (M, K) @ weight.T + bias. ``out`` is the model's dtype, or fp32 (logits)."""

    def gated_linear(self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor, *, gelu: bool = False) -> None:
        """out (M, N / 2) = act(gate) * up, where [gate | up] = x @ weight.T + bias:
        ``linear`` and then ``silu_mul`` (or ``gelu_tanh_mul``), to the bit."""

    def grouped_linear(
        self,
        x: torch.Tensor,
        weights: list[PackedLinear],
        rows: torch.Tensor,
        expert_start: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """For expert e and i in expert_start[e] .. expert_start[e+1]: out[i] = x[rows[i]] @ weights[e].T.

        Experts with no rows are not touched. rows int32 (R,), expert_start int32 (E + 1,), out (R, N).
        """

    def embed_part(
        self, table: torch.Tensor | PackedLinear, tokens: torch.Tensor, rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        """As ``embed``, where the table has only the vocabulary's rows [a, b): out fp32, zeros for all other tokens."""

    def combine(self, rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """out[m] = sum over j, in order, of weights[m, j] * rows[place[m, j]]: what the experts made of each row,
        together.

        rows (R, N), place int64 (M, k), weights fp32 (M, k), out fp32 (M, N); products and sums in fp32. All
        contiguous.
        """

    def embed(self, table: torch.Tensor | PackedLinear, tokens: torch.Tensor, out: torch.Tensor) -> None:
        """out[i] = table[tokens[i]]; tokens int32 (M,). A table that is also the output matrix comes packed (dense)."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, gemma: bool = False
    ) -> None:
        """RMSNorm over the last dimension (x (M, H) or (M, heads, dim)); rounding as in transformers' Llama:
        out = weight * round(x * rsqrt(mean(x^2) + eps)); gemma: out = round(x * rsqrt(...) * (1 + weight)) in fp32."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """residual += x (rounded to its dtype), then out = rms_norm(residual)."""

    def rope_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: AttentionBatch,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
    ) -> None:
        """Rotate q (M, Hq, D; row stride may exceed Hq*D) in place,
        write rotated k and v into the pools at batch.slots.

        cos, sin: the model's dtype (max_positions, D / 2), rotate-half convention; rounding as in transformers
        (cos/sin rounded to the model's dtype, products and sum rounded to the model's dtype).
        Pools: (num_pages, heads, page_size, D).
        """

    def attention(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        out: torch.Tensor,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        """Causal attention of q (M, Hq, D) over the pools through the page tables; out (M, Hq, Dv).

        Keys are summed in blocks at fixed absolute positions, so that chunking and page size never change a bit.
        """

    def latent_store(self, latent: torch.Tensor, batch: AttentionBatch, pool: torch.Tensor) -> None:
        """Write latent (M, R) (compressed vector and rotated rope key side by side) into pool (pages, 1, page_size,
        R).
        """

    def latent_attention(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        value_dim: int,
        out: torch.Tensor,
    ) -> None:
        """Absorbed multi-head latent attention: q (M, H, R) against pool (pages, 1, page_size, R); the values are the
        first ``value_dim`` of the same R; out (M, H, value_dim)."""

    def silu_mul(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x (M, 2I) = [gate | up]; out (M, I) = round(silu(gate)) * up."""

    def gelu_tanh_mul(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x (M, 2I) = [gate | up]; out (M, I) = round(gelu_tanh(gate)) * up."""

    def info(self) -> dict[str, Any]:
        """What is used: instruction set, threads, library file."""
