"""Norms, rotary embedding with the cache write, gates, copies and argmax, beside torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, assert_close, random

from forebay.engine.kernels.interface import AttentionBatch
from forebay.engine.kernels.native_backend import NativeBackend
from forebay.engine.kernels.torch_fallback import TorchBackend

pytestmark = pytest.mark.engine

TORCH = TorchBackend()


def slots_batch(rows: int, pages: int, page_size: int, positions: int) -> AttentionBatch:
    generator = torch.Generator().manual_seed(rows)
    empty = torch.zeros(0, dtype=torch.int32)
    return AttentionBatch(
        empty.view(0, 0),
        empty,
        empty,
        torch.randperm(pages * page_size, generator=generator)[:rows],
        torch.randint(0, positions, (rows,), generator=generator).int(),
        page_size,
    )


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(0, 200), dim=st.integers(1, 700), gemma=st.booleans(), dtype=st.sampled_from(DTYPES)
)  # fmt: skip
def test_rms_norm(native: NativeBackend, rows: int, dim: int, gemma: bool, dtype: torch.dtype) -> None:
    x, weight = random((rows, dim), dtype, 1), random((dim,), dtype, 2)
    ours, theirs = torch.empty_like(x), torch.empty_like(x)
    native.rms_norm(x, weight, 1e-5, ours, gemma=gemma)
    TORCH.rms_norm(x, weight, 1e-5, theirs, gemma=gemma)
    if rows:
        assert_close(ours, theirs)


def test_rms_norm_of_heads_inside_a_wider_row(native: NativeBackend, dtype: torch.dtype) -> None:
    wide = random((7, 10 * 32), dtype, 3)
    q = wide[:, 64:192].view(7, 4, 32)
    expected, weight = torch.empty(7, 4, 32, dtype=dtype), random((32,), dtype, 4)
    TORCH.rms_norm(q, weight, 1e-6, expected)
    before = wide.clone()
    native.rms_norm(q, weight, 1e-6, q)
    assert_close(q, expected)
    assert torch.equal(wide[:, :64], before[:, :64])
    assert torch.equal(wide[:, 192:], before[:, 192:])


@pytest.mark.parametrize("rows", [0, 1, 33, 700])
def test_add_rms_norm(native: NativeBackend, dtype: torch.dtype, rows: int) -> None:
    x, residual, weight = random((rows, 576), dtype, 5), random((rows, 576), dtype, 6), random((576,), dtype, 7)
    theirs, expected = residual.clone(), torch.empty_like(x)
    TORCH.add_rms_norm(x, theirs, weight, 1e-5, expected)
    ours = torch.empty_like(x)
    native.add_rms_norm(x, residual, weight, 1e-5, ours)
    assert torch.equal(residual, theirs)
    if rows:
        assert_close(ours, expected)


@pytest.mark.parametrize("rows", [0, 1, 50, 400])
@pytest.mark.parametrize("dim", [8, 64, 96])
def test_rope_store(native: NativeBackend, dtype: torch.dtype, rows: int, dim: int) -> None:
    heads, kv_heads, page_size, pages = 6, 2, 16, 30
    batch = slots_batch(rows, pages, page_size, 100)
    cos, sin = random((100, dim // 2), dtype, 8), random((100, dim // 2), dtype, 9)
    results = []
    for backend in (native, TORCH):
        qkv = random((rows, (heads + 2 * kv_heads) * dim), dtype, 10)
        q, k, v = (part.unflatten(1, (-1, dim)) for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], 1))
        pools = torch.zeros(2, pages, kv_heads, page_size, dim, dtype=dtype)
        backend.rope_store(q, k, v, cos, sin, batch, pools[0], pools[1])
        results.append((q, *pools))
    for ours, theirs in zip(*results):
        assert_close(ours, theirs) if ours.numel() else None
    assert torch.equal(results[0][2], results[1][2])


def test_latent_store_and_embed_are_copies(native: NativeBackend, dtype: torch.dtype) -> None:
    batch = slots_batch(20, 4, 8, 10)
    latent, pool, expected = random((20, 40), dtype, 11), torch.zeros(4, 1, 8, 40, dtype=dtype), None
    native.latent_store(latent, batch, pool)
    expected = torch.zeros_like(pool)
    TORCH.latent_store(latent, batch, expected)
    assert torch.equal(pool, expected)
    table, tokens = random((50, 33), dtype, 12), torch.randint(0, 50, (300,)).int()
    out = torch.empty(300, 33, dtype=dtype)
    native.embed(table, tokens, out)
    assert torch.equal(out, table[tokens.long()])
    out.zero_()
    native.embed(native.pack_linear(table), tokens, out)  # a table that is the output matrix too
    assert torch.equal(out, table[tokens.long()])
    parts, expected = torch.empty(300, 33), torch.empty(300, 33)
    for share in (table[20:], native.pack_linear(table[20:])):  # a rank that has the last thirty of fifty
        native.embed_part(share, tokens, (20, 50), parts)
        TORCH.embed_part(table[20:], tokens, (20, 50), expected)
        assert torch.equal(parts, expected)


@pytest.mark.parametrize("width", [1, 40, 2048])
def test_what_experts_made_is_summed_in_order(native: NativeBackend, dtype: torch.dtype, width: int) -> None:
    rows, weights = random((300, width), dtype, 20), torch.rand(100, 3)
    place = torch.randint(0, 300, (100, 3))
    ours, alone, expected = torch.empty(100, width), torch.empty(1, width), torch.empty(100, width)
    native.combine(rows, place, weights, ours)
    TORCH.combine(rows, place, weights, expected)
    torch.testing.assert_close(ours, expected)
    native.combine(rows, place[70:71].contiguous(), weights[70:71].contiguous(), alone)
    assert torch.equal(alone, ours[70:71])


@pytest.mark.parametrize("inner", [1, 40, 1536])
@pytest.mark.parametrize("rows", [0, 1, 200])
def test_gates(native: NativeBackend, dtype: torch.dtype, inner: int, rows: int) -> None:
    x = random((rows, 2 * inner), dtype, 13) * 4
    gate, up = x.float().chunk(2, -1)
    for op, act in ((native.silu_mul, F.silu(gate)), (native.gelu_tanh_mul, F.gelu(gate, approximate="tanh"))):
        out = torch.empty(rows, inner, dtype=dtype)
        op(x, out)
        if rows:
            assert_close(out, act.to(dtype).float() * up, steps=3)


def test_silu_of_extremes(native: NativeBackend, dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e4, -200.0, -90.0, 0.0, 90.0, 1e4]).to(dtype)
    out = torch.empty(1, 6, dtype=dtype)
    native.silu_mul(torch.cat([gate, torch.ones(6).to(dtype)]).view(1, 12), out)
    assert torch.allclose(out.float(), F.silu(gate.float()).view(1, 6), rtol=1e-2, atol=1e-30)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 49152])
def test_argmax_takes_the_first_of_equals(native: NativeBackend, n: int) -> None:
    x = random((5, n), torch.float32, 14)
    x[1] = 3.0
    x[2, n // 2 :] = 9.0
    out = torch.empty(5, dtype=torch.int64)
    native.argmax(x, out)
    assert out.tolist() == [int(row.eq(row.max()).nonzero()[0]) for row in x]
