"""Quantized weights as checkpoints store them: which scheme a module uses, and a rank's slice of its packed tensors.

Three forms: ``compressed-tensors`` pack-quantized INT4 (symmetric, groups of 32: how Kimi-K2.5 ships its routed
experts), FP8 with a scale for each block of 128 x 128 (how DeepSeek-V3 ships), and int8 with a scale for each output
channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forebay.engine.checkpoint.checkpoint import Checkpoint
from forebay.engine.kernels.torch_fallback import dequantize
from forebay.errors import UsageError

__all__ = ["QuantScheme", "QuantizedPart", "check_quantization", "quantized_shape", "read_quantized", "scheme_of"]

Range = tuple[int, int]
_INT4_PER_WORD = 8


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """A stored form.

    Args:
        kernel: the scheme's name in ``KernelBackend.pack_quantized``.
        row_block: rows that share a scale.
        col_block: columns that share a scale (0: all of a row's).
        scale: suffix of the scales' tensor.
    """

    kernel: str
    row_block: int
    col_block: int
    scale: str

    def can_stack(self, rows: int) -> bool:
        """Whether another weight's rows may follow ``rows`` rows of this one."""
        return rows % self.row_block == 0


INT4 = QuantScheme("int4_g32", 1, 32, "weight_scale")
FP8 = QuantScheme("fp8_block", 128, 128, "weight_scale_inv")
INT8 = QuantScheme("int8", 1, 0, "weight_scale")


@dataclass(slots=True)
class QuantizedPart:
    """A rank's slice of one quantized weight, in the layout ``pack_quantized`` takes."""

    scheme: QuantScheme
    tensors: dict[str, torch.Tensor]
    shape: tuple[int, int]

    def dense(self) -> torch.Tensor:
        """The fp32 matrix."""
        return dequantize(self.scheme.kernel, self.tensors, self.shape)


def check_quantization(config: Mapping[str, Any]) -> None:
    """Refuse, before any weight is read, a quantization config whose form we do not have.

    Raises:
        UsageError: naming what the config asks for and what we have.
    """
    quant = config.get("quantization_config")
    if not quant:
        return
    method = quant.get("quant_method")
    if method == "fp8":
        block = list(quant.get("weight_block_size") or ())
        if block != [128, 128]:
            _refuse(f"fp8 weights with weight_block_size {block or None}")
        return
    if method != "compressed-tensors":
        _refuse(f"quantization method {method!r}")
    for name, group in (quant.get("config_groups") or {}).items():
        weights = group.get("weights") or {}
        form = group.get("format") or quant.get("format")
        bits, strategy = weights.get("num_bits"), weights.get("strategy")
        what = f"{name}: {bits}-bit {weights.get('type')} weights, {strategy} scales, format {form}"
        int4 = form == "pack-quantized" and bits == 4 and strategy == "group" and weights.get("group_size") == 32
        int8 = form == "int-quantized" and bits == 8 and strategy == "channel"
        if not (int4 or int8) or weights.get("type", "int") != "int" or not weights.get("symmetric", True):
            _refuse(what)
        if weights.get("actorder"):
            _refuse(f"{what} with activation ordering")


def _refuse(what: str) -> None:
    raise UsageError(
        f"config.json's quantization is not supported: {what}",
        fix="Forebay reads compressed-tensors pack-quantized INT4 (group 32, symmetric), compressed-tensors int8 "
        "with channel scales, and fp8 with blocks of 128 x 128",
    )


def scheme_of(checkpoint: Checkpoint, module: str) -> QuantScheme | None:
    """The stored form of ``module``'s weight; None: dense."""
    if f"{module}.weight_packed" in checkpoint:
        return INT4
    if f"{module}.weight_scale_inv" in checkpoint:
        return FP8
    if f"{module}.weight_scale" in checkpoint:
        if checkpoint[f"{module}.weight"].dtype == torch.int8:
            return INT8
        raise UsageError(f"tensor {module}.weight is scaled but not int8, INT4 or FP8 in a form that Forebay reads")
    return None


def quantized_shape(shape: Callable[[str], tuple[int, ...]], scheme: QuantScheme, module: str) -> tuple[int, int]:
    """Rows and columns of the matrix that a quantized weight stands for."""
    height, words = shape(_stored(scheme, module))
    width = shape(f"{module}.{scheme.scale}")[1] * scheme.col_block if scheme is INT4 else words
    return height, width


def _stored(scheme: QuantScheme, module: str) -> str:
    return f"{module}.weight_packed" if scheme is INT4 else f"{module}.weight"


def read_quantized(
    read: Callable[..., torch.Tensor],
    shape: Callable[[str], tuple[int, ...]],
    scheme: QuantScheme,
    module: str,
    rows: Range | None,
    cols: Range | None,
) -> QuantizedPart:
    """A slice of a quantized weight.

    Raises:
        UsageError: the slice cuts through a block that shares a scale.
    """
    stored = _stored(scheme, module)
    height, width = quantized_shape(shape, scheme, module)
    row_range, col_range = rows or (0, height), cols or (0, width)
    _check_cut(module, "rows", row_range, height, scheme.row_block)
    _check_cut(module, "columns", col_range, width, scheme.col_block or 1)
    per_word = _INT4_PER_WORD if scheme is INT4 else 1
    word_cols = None if cols is None else (cols[0] // per_word, cols[1] // per_word)
    tensors = {stored.rsplit(".", 1)[1]: read(stored, rows=rows, cols=word_cols)}
    scale_rows = None if rows is None else (rows[0] // scheme.row_block, -(-rows[1] // scheme.row_block))
    scale_cols = None
    if cols is not None and scheme.col_block:
        scale_cols = (cols[0] // scheme.col_block, -(-cols[1] // scheme.col_block))
    scale = read(f"{module}.{scheme.scale}", rows=scale_rows, cols=scale_cols)
    tensors[scheme.scale] = scale.float() if scheme is FP8 else scale
    return QuantizedPart(scheme, tensors, (row_range[1] - row_range[0], col_range[1] - col_range[0]))


def _check_cut(module: str, what: str, span: Range, size: int, block: int) -> None:
    if span[0] % block or (span[1] % block and span[1] != size):
        raise UsageError(
            f"{module}: this rank's {what} {span[0]}..{span[1]} cut through a block of {block} that shares a scale",
            fix="use fewer ranks (--tp)",
        )
