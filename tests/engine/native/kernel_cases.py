"""Random inputs for kernel tests, and how close is close."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forebay.engine.kernels.interface import AttentionBatch, KernelBackend

DTYPES = (torch.bfloat16, torch.float32)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(ours: torch.Tensor, exact: torch.Tensor, *, steps: float = 2.0) -> None:
    """Within ``steps`` roundings of ours' dtype, relative to the values' size."""
    eps = torch.finfo(ours.dtype).eps * (1 if ours.dtype == torch.bfloat16 else 64)
    error = (ours.double() - exact.double()).abs()
    allowed = steps * eps * (exact.double().abs() + exact.double().abs().mean())
    assert bool((error <= allowed).all()), f"off by {error.max():.3g}, allowed {allowed.flatten()[error.argmax()]:.3g}"


def linear(backend: KernelBackend, x: torch.Tensor, weight: object, n: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full((x.shape[0], n), float("nan"), dtype=dtype)
    backend.linear(x, weight, out)  # type: ignore[arg-type]
    return out


@dataclass
class Paged:
    """Sequences' keys and values, dense, and as pages of a pool with rubbish in every slot nobody may read."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    heads: int
    kv_heads: int

    def batch(
        self, queries: list[tuple[int, int]], page_size: int, window: int | None = None
    ) -> tuple[AttentionBatch, torch.Tensor, torch.Tensor]:
        """(batch, k pool, v pool) for one (first, end) range of query positions a sequence."""
        dtype, dim, value_dim = self.keys[0].dtype, self.keys[0].shape[2], self.values[0].shape[2]
        pages = [-(-end // page_size) for _, end in queries]
        order = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(page_size)).tolist()
        shape = (len(order), self.kv_heads, page_size)
        k_pool = torch.full((*shape, dim), float("nan"), dtype=dtype)
        v_pool = torch.full((*shape, value_dim), float("nan"), dtype=dtype)
        table = torch.full((len(queries), max(pages, default=0) + 1), -1, dtype=torch.int32)
        for index, (first, end) in enumerate(queries):
            visible = 0 if window is None else max(0, first - window + 1)
            for page in range(visible // page_size, pages[index]):
                at = table[index, page] = order.pop()
                span = slice(page * page_size, min(end, (page + 1) * page_size))
                count = span.stop - span.start
                k_pool[at, :, :count] = self.keys[index][span].transpose(0, 1)
                v_pool[at, :, :count] = self.values[index][span].transpose(0, 1)
        starts = [0]
        for first, end in queries:
            starts.append(starts[-1] + end - first)
        rows = starts[-1]
        batch = AttentionBatch(
            table,
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([end for _, end in queries], dtype=torch.int32),
            torch.zeros(rows, dtype=torch.int64),
            torch.zeros(rows, dtype=torch.int32),
            page_size,
        )
        return batch, k_pool, v_pool


def exact_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of one sequence's queries q (n, Hq, D) at positions first .., in fp64."""
    group = q.shape[1] // keys.shape[1]
    k = keys.double().repeat_interleave(group, 1)
    v = values.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(first, first + q.shape[0])[:, None]
    key = torch.arange(keys.shape[0])[None, :]
    hidden = key > at
    if window is not None:
        hidden |= key <= at - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
