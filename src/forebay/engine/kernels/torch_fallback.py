"""The kernels in torch: used without a C++ compiler, and as the reference that the native library is compared with.

Correct within rounding, and not fast. Attention is computed sequence by sequence, in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from forebay.engine.kernels.interface import AttentionBatch, PackedLinear, ReadRows

__all__ = ["TorchBackend", "dequantize"]


@dataclass(slots=True)
class DenseLinear:
    """A weight as it is."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    in_features: int
    nbytes: int

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.to(dtype)


@dataclass(slots=True)
class QuantizedLinear:
    """Packed bytes, dequantized during each product."""

    scheme: str
    tensors: dict[str, torch.Tensor]
    bias: None
    out_features: int
    in_features: int
    nbytes: int

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(self.scheme, self.tensors, (self.out_features, self.in_features)).to(dtype)


def dequantize(scheme: str, tensors: dict[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
    """The fp32 matrix of a quantized weight (schemes as in ``KernelBackend.pack_quantized``)."""
    rows, cols = shape
    if scheme == "int4_g32":
        packed, scale = tensors["weight_packed"], tensors["weight_scale"]
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        values = ((packed.unsqueeze(-1) >> shifts) & 0xF).reshape(rows, -1)[:, :cols] - 8
        return (values.float().view(rows, -1, 32) * scale.float().unsqueeze(-1)).view(rows, cols)
    if scheme == "fp8_block":
        scale = tensors["weight_scale_inv"].float()
        scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
        return tensors["weight"].float() * scale
    if scheme == "int8":
        return tensors["weight"].float() * tensors["weight_scale"].float().view(rows, 1)
    raise ValueError(f"unknown quantization scheme {scheme!r}")


class TorchBackend:
    """Implements ``KernelBackend``."""

    name = "torch"

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        weight = weight.contiguous()
        nbytes = weight.numel() * weight.element_size()
        return DenseLinear(weight, bias, weight.shape[0], weight.shape[1], nbytes)

    def pack_quantized(self, scheme: str, tensors: dict[str, torch.Tensor], shape: tuple[int, int]) -> PackedLinear:
        kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
        nbytes = sum(t.numel() * t.element_size() for t in kept.values())
        return QuantizedLinear(scheme, kept, None, shape[0], shape[1], nbytes)

    def pack_rows(
        self, scheme: str | None, shape: tuple[int, int], read: ReadRows, bias: torch.Tensor | None = None
    ) -> PackedLinear:
        tensors = read(0, shape[0])  # kept as they are
        if scheme is None:
            return self.pack_linear(tensors["weight"], bias)
        return self.pack_quantized(scheme, tensors, shape)

    def linear(self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor) -> None:
        assert isinstance(weight, DenseLinear | QuantizedLinear)
        dense = weight.dense(x.dtype)
        if out.dtype == x.dtype and weight.bias is None:
            torch.mm(x, dense.t(), out=out)
        else:
            out.copy_(F.linear(x, dense, weight.bias))

    def gated_linear(self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor, *, gelu: bool = False) -> None:
        both = x.new_empty(x.shape[0], weight.out_features)
        self.linear(x, weight, both)
        (self.gelu_tanh_mul if gelu else self.silu_mul)(both, out)

    def grouped_linear(
        self,
        x: torch.Tensor,
        weights: list[PackedLinear],
        rows: torch.Tensor,
        expert_start: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        starts = expert_start.tolist()
        for expert, weight in enumerate(weights):
            begin, end = starts[expert], starts[expert + 1]
            if begin < end:
                self.linear(x[rows[begin:end].long()], weight, out[begin:end])

    def embed_part(
        self, table: torch.Tensor | PackedLinear, tokens: torch.Tensor, rows: tuple[int, int], out: torch.Tensor
    ) -> None:
        if isinstance(table, DenseLinear):
            table = table.weight
        assert isinstance(table, torch.Tensor)
        mine = (tokens >= rows[0]) & (tokens < rows[1])
        out.zero_()
        out[mine] = table[(tokens[mine] - rows[0]).long()].float()

    def combine(self, rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()
        for j in range(place.shape[1]):
            out.addcmul_(rows[place[:, j]].float(), weights[:, j : j + 1])

    def embed(self, table: torch.Tensor | PackedLinear, tokens: torch.Tensor, out: torch.Tensor) -> None:
        if isinstance(table, DenseLinear):
            table = table.weight
        assert isinstance(table, torch.Tensor)
        torch.index_select(table, 0, tokens, out=out)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, gemma: bool = False
    ) -> None:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if gemma:
            out.copy_(wide * (1.0 + weight.float()))
        else:
            out.copy_(weight * wide.to(x.dtype))

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        residual.add_(x)
        self.rms_norm(residual, weight, eps, out)

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
        at = batch.positions.long()
        c, s = cos[at].unsqueeze(1), sin[at].unsqueeze(1)
        q.copy_(_rotate(q, c, s))
        page, offset = batch.slots // batch.page_size, batch.slots % batch.page_size
        k_pool[page, :, offset] = _rotate(k, c, s)
        v_pool[page, :, offset] = v

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
        for rows, keys, first in _sequences(batch, window):
            k = _gather(k_pool, keys, first, batch.page_size, rows)
            v = _gather(v_pool, keys, first, batch.page_size, rows)
            group = q.shape[1] // k.shape[0]
            queries = q[rows[0] : rows[1]].float().transpose(0, 1).reshape(k.shape[0], group, -1, q.shape[2])
            scores = torch.matmul(queries, k.float().transpose(1, 2).unsqueeze(1)) * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            scores.masked_fill_(_hidden(rows, first, k.shape[1], window), float("-inf"))
            values = torch.matmul(torch.softmax(scores, -1), v.float().unsqueeze(1))
            out[rows[0] : rows[1]] = values.flatten(0, 1).transpose(0, 1).to(out.dtype)

    def latent_store(self, latent: torch.Tensor, batch: AttentionBatch, pool: torch.Tensor) -> None:
        pool[batch.slots // batch.page_size, 0, batch.slots % batch.page_size] = latent

    def latent_attention(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        value_dim: int,
        out: torch.Tensor,
    ) -> None:
        for rows, keys, first in _sequences(batch, None):
            k = _gather(pool, keys, first, batch.page_size, rows)[0].float()
            scores = torch.matmul(q[rows[0] : rows[1]].float().transpose(0, 1), k.t()) * scale
            scores.masked_fill_(_hidden(rows, first, k.shape[0], None), float("-inf"))
            values = torch.matmul(torch.softmax(scores, -1), k[:, :value_dim])
            out[rows[0] : rows[1]] = values.transpose(0, 1).to(out.dtype)

    def silu_mul(self, x: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = x.chunk(2, -1)
        torch.mul(F.silu(gate), up, out=out)

    def gelu_tanh_mul(self, x: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = x.chunk(2, -1)
        torch.mul(F.gelu(gate, approximate="tanh"), up, out=out)

    def info(self) -> dict[str, Any]:
        return {"name": self.name, "threads": torch.get_num_threads(), "torch": torch.__version__}


_Rows = tuple[int, int, int]
"""First and past-the-end query row of a sequence, and the absolute position of the first."""


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate-half of x (M, heads, D) by cos, sin (M, 1, D / 2)."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _sequences(batch: AttentionBatch, window: int | None) -> list[tuple[_Rows, torch.Tensor, int]]:
    """For each sequence with queries: its rows, the pages it reads, and the first key's absolute position."""
    starts, lengths = batch.query_start.tolist(), batch.context_len.tolist()
    found = []
    for index, length in enumerate(lengths):
        begin, end = starts[index], starts[index + 1]
        if begin == end:
            continue
        position = length - (end - begin)
        first_page = 0 if window is None else max(0, position - window + 1) // batch.page_size
        last_page = -(-length // batch.page_size)
        pages = batch.page_table[index, first_page:last_page].long()
        found.append(((begin, end, position), pages, first_page * batch.page_size))
    return found


def _gather(pool: torch.Tensor, pages: torch.Tensor, first: int, page_size: int, rows: _Rows) -> torch.Tensor:
    """Keys (heads, tokens, dim) of absolute positions ``first`` up to the sequence's last query."""
    tokens = rows[2] + (rows[1] - rows[0]) - first
    return pool[pages].transpose(0, 1).flatten(1, 2)[:, :tokens]


def _hidden(rows: _Rows, first: int, tokens: int, window: int | None) -> torch.Tensor:
    """True where a query may not see a key: (queries, tokens)."""
    query = torch.arange(rows[2], rows[2] + rows[1] - rows[0])[:, None]
    key = torch.arange(first, first + tokens)[None, :]
    hidden = key > query
    return hidden if window is None else hidden | (key <= query - window)
