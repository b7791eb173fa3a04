"""Weights in the native library's layout: allocated whole, packed from rows as they are read.

The layouts (native/abi.h) are in units of 16 outputs, so any multiple of 16 rows is a contiguous part of the whole and
can be packed separately.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import Any

import torch

from forebay.engine.kernels.interface import ReadRows
from forebay.engine.memory.arena import Arena

__all__ = ["NativeLinear", "WeightPacker"]

_WEIGHT = Struct("<8q")
_pack_args = Struct("<3q").pack
_ROW_STEP = 128
"""Rows are read and packed in multiples of this: a whole number of panels and of FP8's blocks."""
_READ_BYTES = 4 << 20
"""And about so many bytes (in bf16) at a time: memory beside the packed weights, small enough for the caches."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How a weight is stored: its kind in abi.h, and the bytes of a block of 16 outputs by 32 inputs."""

    name: str
    kind: int
    block_bytes: int
    dtype: torch.dtype | None = None
    has_row_scales: bool = False


_FORMS = {
    "bf16": _Form("bf16", 0, 1024, torch.bfloat16),
    "fp32": _Form("fp32", 1, 2048, torch.float32),
    "int4_g32": _Form("int4_g32", 2, 256 + 32),
    "fp8_block": _Form("fp8_block", 3, 512 + 64),
    "int8": _Form("int8", 4, 512, has_row_scales=True),
}


def _dense_form(dtype: torch.dtype) -> _Form:
    return _FORMS["bf16" if dtype == torch.bfloat16 else "fp32"]


def _quantized_form(scheme: str) -> _Form:
    if scheme not in ("int4_g32", "fp8_block", "int8"):
        raise ValueError(f"unknown quantization scheme {scheme!r}")
    return _FORMS[scheme]


def _padded(shape: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // 16) * 16, -(-shape[1] // 32) * 32


@dataclass(slots=True, eq=False)
class NativeLinear:
    """A packed weight; implements ``PackedLinear``. ``address`` points at its descriptor."""

    out_features: int
    in_features: int
    nbytes: int
    address: int
    dtype: torch.dtype | None
    """Of the activations it takes; None: either (quantized)."""
    keep: tuple[Any, ...]
    """Memory that must stay allocated: the descriptor, the packed bytes, scales and bias."""
    form: _Form


class WeightPacker:
    """Packs weights; see ``KernelBackend`` for what each form takes.

    Args:
        pack: the library's operation, called with its arguments' bytes.
    """

    def __init__(self, pack: Callable[[bytes], None]) -> None:
        self._pack = pack
        self._arena = Arena()

    def dense(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NativeLinear:
        n, k = weight.shape
        linear = self._begin(_dense_form(weight.dtype), (n, k), bias)
        self._fill(linear, 0, n, {"weight": weight})
        return linear

    def quantized(self, scheme: str, tensors: dict[str, torch.Tensor], shape: tuple[int, int]) -> NativeLinear:
        linear = self._begin(_quantized_form(scheme), shape, None)
        self._fill(linear, 0, shape[0], tensors)
        return linear

    def rows(
        self, scheme: str | None, shape: tuple[int, int], read: ReadRows, bias: torch.Tensor | None = None
    ) -> NativeLinear:
        rows, first = shape[0], 0
        linear: NativeLinear | None = None
        step = max(_ROW_STEP, _READ_BYTES // (2 * shape[1]) // _ROW_STEP * _ROW_STEP)
        while first < rows or linear is None:
            last = min(rows, first + step)
            tensors = read(first, last)
            if linear is None:
                form = _dense_form(tensors["weight"].dtype) if scheme is None else _quantized_form(scheme)
                linear = self._begin(form, shape, bias)
            self._fill(linear, first, last, tensors)
            first = last
        return linear

    def _begin(self, form: _Form, shape: tuple[int, int], bias: torch.Tensor | None) -> NativeLinear:
        """A weight whose rows are still to be filled in."""
        n, k = shape
        np_, kp = _padded(shape)
        data = self._arena.allocate(np_ // 16 * (kp // 32) * form.block_bytes)
        wide_bias = None
        if bias is not None:
            wide_bias = torch.zeros(np_, dtype=torch.float32)
            wide_bias[:n] = bias
        scales = torch.zeros(np_, dtype=torch.float32) if form.has_row_scales else None
        descriptor = ctypes.create_string_buffer(
            _WEIGHT.pack(
                form.kind, n, k, np_, kp, data.data_ptr(), 0 if scales is None else scales.data_ptr(),
                0 if wide_bias is None else wide_bias.data_ptr(),
            )
        )  # fmt: skip
        keep = (descriptor, data, scales, wide_bias)
        return NativeLinear(n, k, data.numel(), ctypes.addressof(descriptor), form.dtype, keep, form)

    def _fill(self, linear: NativeLinear, first: int, last: int, tensors: dict[str, torch.Tensor]) -> None:
        """Pack rows [first, last); ``first`` is a multiple of 16."""
        form, data, scales = linear.form, linear.keep[1], linear.keep[2]
        shape = (last - first, linear.in_features)
        np_, kp = _padded(shape)
        source = tensors["weight_packed" if form.name == "int4_g32" else "weight"].contiguous()
        source_scales: torch.Tensor | None = None
        if form.name == "int4_g32":
            source_scales = tensors["weight_scale"].to(torch.bfloat16).contiguous()
            if not torch.equal(source_scales.float(), tensors["weight_scale"].float()):
                raise ValueError("int4_g32: weight_scale has values that are not bf16")
            size = source_scales.float().abs()
            if not bool(((size == 0) | ((size > 2.0**-100) & (size < 2.0**100))).all()):
                raise ValueError("int4_g32: weight_scale has values beyond 2^-100 .. 2^100")
        elif form.name == "fp8_block":
            source_scales = tensors["weight_scale_inv"].float().contiguous()
        elif form.has_row_scales:
            scales[first:last] = tensors["weight_scale"].flatten()
        at = data.data_ptr() + first // 16 * (kp // 32) * form.block_bytes
        part = ctypes.create_string_buffer(_WEIGHT.pack(form.kind, *shape, np_, kp, at, 0, 0))
        scale_address = 0 if source_scales is None else source_scales.data_ptr()
        self._pack(_pack_args(ctypes.addressof(part), source.data_ptr(), scale_address))
