"""Paged attention: right for any mixture of sequences, and the same bits whatever the chunks, pages and neighbours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, Paged, assert_close, exact_attention, random

from forebay.engine.kernels.native_backend import NativeBackend

pytestmark = pytest.mark.engine


def paged(lengths: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, value_dim: int = 0) -> Paged:
    keys = [random((n, kv_heads, dim), dtype, 20 + i) for i, n in enumerate(lengths)]
    values = [random((n, kv_heads, value_dim or dim), dtype, 40 + i) for i, n in enumerate(lengths)]
    return Paged(keys, values, heads, kv_heads)


def attend(
    native: NativeBackend,
    data: Paged,
    q: list[torch.Tensor],
    ranges: list[tuple[int, int]],
    page_size: int,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    batch, k_pool, v_pool = data.batch(ranges, page_size, window)
    rows = torch.cat([part[first:end] for part, (first, end) in zip(q, ranges)])
    out = torch.full((*rows.shape[:2], v_pool.shape[3]), float("nan"), dtype=rows.dtype)
    native.attention(rows, k_pool, v_pool, batch, rows.shape[2] ** -0.5, out, window=window, softcap=softcap)
    return out


@settings(max_examples=12, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 150)), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (9, 3), (8, 1)]),
    dim=st.sampled_from([8, 16, 40, 64, 128]),
    page_size=st.sampled_from([1, 3, 16, 64]),
    window=st.one_of(st.none(), st.integers(1, 200)),
    softcap=st.sampled_from([None, 20.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_any_mixture_is_right(
    native: NativeBackend,
    spans: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    page_size: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
) -> None:
    ranges = [(cached, cached + new) for new, cached in spans]
    data = paged([end for _, end in ranges], *heads, dim, dtype)
    q = [random((end, heads[0], dim), dtype, 60 + i) for i, (_, end) in enumerate(ranges)]
    out = attend(native, data, q, ranges, page_size, window, softcap)
    at = 0
    for i, (first, end) in enumerate(ranges):
        exact = exact_attention(q[i][first:end], data.keys[i], data.values[i], first, dim**-0.5, window, softcap)
        if end > first:
            assert_close(out[at : at + end - first], exact, steps=4)
        at += end - first


@pytest.mark.parametrize("window", [None, 100])
def test_chunks_pages_and_neighbours_never_change_a_bit(
    native: NativeBackend, dtype: torch.dtype, window: int | None
) -> None:
    length, dim = 1100, 32
    data = paged([length, 300], 3, 1, dim, dtype)
    q = [random((length, 3, dim), dtype, 70), random((300, 3, dim), dtype, 71)]
    whole = attend(native, data, q[:1], [(0, length)], 16, window)
    lone = Paged(data.keys[:1], data.values[:1], 3, 1)
    for page_size, chunk in ((1, 1000), (8, 500), (64, 333)):
        for first in range(0, length, chunk):
            end = min(length, first + chunk)
            assert torch.equal(attend(native, lone, q[:1], [(first, end)], page_size, window), whole[first:end])
    for first in (0, 1, 63, 64, 511, 512, 1099):
        token = [(first, first + 1)]
        assert torch.equal(attend(native, lone, q[:1], token, 16, window), whole[first : first + 1])
        beside = attend(native, data, q, [*token, (250, 300)], 16, window)
        assert torch.equal(beside[:1], whole[first : first + 1])


@settings(max_examples=12, deadline=None)
@given(
    dim=st.sampled_from([16, 40, 64]),
    value_dim=st.sampled_from([16, 40, 64]),
    heads=st.sampled_from([(3, 1), (2, 2), (14, 2)]),
    page_size=st.sampled_from([3, 16, 64]),
    window=st.one_of(st.none(), st.integers(1, 900)),
    softcap=st.sampled_from([None, 20.0]),
    tokens=st.integers(1, 2),
    dtype=st.sampled_from(DTYPES),
)
def test_few_rows_have_the_bits_of_many(
    native: NativeBackend,
    dim: int,
    value_dim: int,
    heads: tuple[int, int],
    page_size: int,
    window: int | None,
    softcap: float | None,
    tokens: int,
    dtype: torch.dtype,
) -> None:
    length = 700
    data = paged([length], *heads, dim, dtype, value_dim)
    q = [random((length, heads[0], dim), dtype, 75)]
    whole = attend(native, data, q, [(0, length)], 16, window, softcap)
    for first in (0, 15, 62, 511, length - tokens):
        end = first + tokens
        assert torch.equal(attend(native, data, q, [(first, end)], page_size, window, softcap), whole[first:end])


def test_queries_inside_a_wider_row_are_read_with_their_stride(native: NativeBackend, dtype: torch.dtype) -> None:
    data = paged([40], 4, 2, 32, dtype)
    batch, k_pool, v_pool = data.batch([(30, 40)], 16)
    wide = random((10, 8 * 32), dtype, 80)
    q = wide[:, : 4 * 32].view(10, 4, 32)
    out, again = torch.empty(10, 4, 32, dtype=dtype), torch.empty(10, 4, 32, dtype=dtype)
    native.attention(q, k_pool, v_pool, batch, 0.2, out)
    native.attention(q.contiguous(), k_pool, v_pool, batch, 0.2, again)
    assert torch.equal(out, again)


@pytest.mark.parametrize(("rank", "value_dim"), [(576, 512), (40, 32)])
def test_latent_attention_reads_values_from_the_front_of_the_keys(
    native: NativeBackend, dtype: torch.dtype, rank: int, value_dim: int
) -> None:
    lengths, heads = [(90, 91), (0, 70)], 20
    latents = [random((end, 1, rank), dtype, 90 + i) for i, (_, end) in enumerate(lengths)]
    data = Paged(latents, latents, heads, 1)
    batch, pool, _ = data.batch(lengths, 16)
    q = [random((end, heads, rank), dtype, 95 + i) for i, (_, end) in enumerate(lengths)]
    rows = torch.cat([q[0][90:], q[1]])
    out = torch.empty(71, heads, value_dim, dtype=dtype)
    native.latent_attention(rows, pool, batch, rank**-0.5, value_dim, out)
    for part, i in ((out[:1], 0), (out[1:], 1)):
        first, end = lengths[i]
        exact = exact_attention(q[i][first:end], latents[i], latents[i][..., :value_dim], first, rank**-0.5)
        assert_close(part, exact, steps=4)
    lone = Paged(latents[:1], latents[:1], heads, 1)
    for page_size in (1, 64):
        batch, pool, _ = lone.batch(lengths[:1], page_size)
        again = torch.empty(1, heads, value_dim, dtype=dtype)
        native.latent_attention(q[0][90:], pool, batch, rank**-0.5, value_dim, again)
        assert torch.equal(again, out[:1])
