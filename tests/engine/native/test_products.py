"""Products with packed weights: right on ragged shapes, and the same bits for a row whatever is beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, assert_close, linear, random

from forebay.engine.kernels.native_backend import NativeBackend
from forebay.engine.kernels.torch_fallback import dequantize

pytestmark = pytest.mark.engine

SCHEMES = ("int4_g32", "fp8_block", "int8")


def quantized(scheme: str, n: int, k: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(n * k)
    if scheme == "int4_g32":
        words = torch.randint(-(2**31), 2**31, (n, k // 8), generator=generator)
        scale = (torch.rand(n, k // 32, generator=generator) / 50).bfloat16()
        return {"weight_packed": words.to(torch.int32), "weight_scale": scale}
    if scheme == "fp8_block":
        scale = torch.rand(-(-n // 128), -(-k // 128), generator=generator) / 100
        return {"weight": random((n, k), torch.float32, n).to(torch.float8_e4m3fn), "weight_scale_inv": scale}
    values = torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8)
    return {"weight": values, "weight_scale": torch.rand(n, 1, generator=generator) / 100}


@settings(max_examples=15, deadline=None)
@given(
    rows=st.one_of(st.integers(0, 70), st.integers(71, 300)),
    n=st.integers(1, 200),
    k=st.integers(1, 300),
    bias=st.booleans(),
    wide=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape_is_right(
    native: NativeBackend, rows: int, n: int, k: int, bias: bool, wide: bool, dtype: torch.dtype
) -> None:
    x, weight = random((rows, k), dtype, 1), random((n, k), dtype, 2)
    added = random((n,), dtype, 3) if bias else None
    out = linear(native, x, native.pack_linear(weight, added), n, torch.float32 if wide else dtype)
    exact = x.double() @ weight.double().t()
    assert_close(out, exact if added is None else exact + added.double())


@pytest.mark.parametrize(("n", "k"), [(576, 576), (100, 1536), (48, 70)])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    native: NativeBackend, dtype: torch.dtype, n: int, k: int
) -> None:
    x = random((600, k), dtype, 4)
    packed = native.pack_linear(random((n, k), dtype, 5))
    whole = linear(native, x, packed, n, torch.float32)
    for first in (0, 7, 513, 599):
        for rows in (1, 2, 16, 17, 33, 63, 64, 65, 80):
            part = x[first : first + rows]
            assert torch.equal(linear(native, part, packed, n, torch.float32), whole[first : first + rows])


def test_a_row_of_a_wider_matrix_is_read_with_its_stride(native: NativeBackend, dtype: torch.dtype) -> None:
    x = random((33, 200), dtype, 6)
    packed = native.pack_linear(random((50, 64), dtype, 7))
    wide_out = torch.zeros(33, 80, dtype=dtype)
    native.linear(x[:, 64:128], packed, wide_out[:, :50])
    assert torch.equal(wide_out[:, :50], linear(native, x[:, 64:128].contiguous(), packed, 50, dtype))
    assert not wide_out[:, 50:].any()


def test_large_outputs_written_around_the_caches_are_the_same(native: NativeBackend) -> None:
    x = random((1100, 32), torch.bfloat16, 8)
    packed = native.pack_linear(random((992, 32), torch.bfloat16, 9))
    whole = linear(native, x, packed, 992, torch.bfloat16)
    assert torch.equal(whole[:50], linear(native, x[:50], packed, 992, torch.bfloat16))
    assert torch.equal(whole[-50:], linear(native, x[-50:], packed, 992, torch.bfloat16))


def test_activations_of_another_dtype_are_refused(native: NativeBackend) -> None:
    packed = native.pack_linear(random((16, 32), torch.bfloat16, 1))
    with pytest.raises(ValueError, match="packed for"):
        linear(native, random((1, 32), torch.float32, 1), packed, 16, torch.float32)


@pytest.mark.parametrize("rows", [1, 40, 700])
@pytest.mark.parametrize("inner", [24, 48, 768])
@pytest.mark.parametrize("gelu", [False, True])
def test_gate_up_and_activation_in_one_is_the_three_apart(
    native: NativeBackend, dtype: torch.dtype, rows: int, inner: int, gelu: bool
) -> None:
    x = random((rows, 64), dtype, 10)
    weight, bias = random((2 * inner, 64), dtype, 11) / 8, random((2 * inner,), dtype, 12)
    packed = native.pack_linear(weight, bias)
    apart, together = torch.empty(rows, inner, dtype=dtype), torch.empty(rows, inner, dtype=dtype)
    wide = linear(native, x, packed, 2 * inner, dtype)
    (native.gelu_tanh_mul if gelu else native.silu_mul)(wide, apart)
    native.gated_linear(x, packed, together, gelu=gelu)
    assert torch.equal(apart, together)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("n", "k"), [(48, 64), (100, 1056), (272, 512)])
def test_a_quantized_product_is_the_dense_product_of_the_dequantised_weight(
    native: NativeBackend, dtype: torch.dtype, scheme: str, n: int, k: int
) -> None:
    tensors = quantized(scheme, n, k)
    packed = native.pack_quantized(scheme, tensors, (n, k))
    dense = native.pack_linear(dequantize(scheme, tensors, (n, k)).to(dtype))
    x = random((300, k), dtype, 13)
    for rows in (1, 5, 17, 64, 65, 300):
        ours = linear(native, x[:rows], packed, n, torch.float32)
        assert torch.equal(ours, linear(native, x[:rows], dense, n, torch.float32))


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_a_weight_packed_as_it_is_read_is_the_weight_packed_whole(native: NativeBackend, scheme: str | None) -> None:
    n, k = 300, 8192  # more than one reading
    asked = []

    def read(first: int, last: int) -> dict[str, torch.Tensor]:
        asked.append((first, last))
        return {
            name: t[first // 128 : -(-last // 128)] if name.endswith("inv") else t[first:last]
            for name, t in tensors.items()
        }

    if scheme is None:
        tensors = {"weight": random((n, k), torch.bfloat16, 14)}
        whole = native.pack_linear(tensors["weight"])
    else:
        tensors = quantized(scheme, n, k)
        whole = native.pack_quantized(scheme, tensors, (n, k))
    packed = native.pack_rows(scheme, (n, k), read)
    assert asked == [(0, 256), (256, 300)]
    x = random((3, k), torch.bfloat16, 15)
    assert torch.equal(linear(native, x, packed, n, torch.float32), linear(native, x, whole, n, torch.float32))


def test_int4_keeps_at_most_three_tenths_of_the_bytes(native: NativeBackend) -> None:
    packed = native.pack_quantized("int4_g32", quantized("int4_g32", 256, 512), (256, 512))
    assert packed.nbytes <= 0.3 * 256 * 512 * 2


@pytest.mark.parametrize("scheme", ["dense", "int4_g32"])
def test_experts_see_their_rows_only(native: NativeBackend, dtype: torch.dtype, scheme: str) -> None:
    n, k, experts = 80, 96, 6
    weights = []
    for expert in range(experts):
        if scheme == "dense":
            weights.append(native.pack_linear(random((n, k), dtype, expert)))
        else:
            weights.append(native.pack_quantized(scheme, quantized(scheme, n, k), (n, k)))
    x = random((90, k), dtype, 14)
    counts = [3, 0, 70, 1, 0, 16]
    rows = torch.randint(0, 90, (sum(counts),), generator=torch.Generator().manual_seed(1)).int()
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    out = torch.full((sum(counts), n), float("nan"), dtype=dtype)
    native.grouped_linear(x, weights, rows, starts, out)
    for expert in range(experts):
        for i in range(int(starts[expert]), int(starts[expert + 1])):
            at = int(rows[i])
            assert torch.equal(out[i : i + 1], linear(native, x[at : at + 1], weights[expert], n, dtype))
