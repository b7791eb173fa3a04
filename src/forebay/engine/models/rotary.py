"""Rotary position embeddings: a checkpoint's rotary settings, and its tables of cosines and sines.

The formulas are those of transformers' ``modeling_rope_utils`` (5.19), to which a test compares them; angles are
fp32, and the tables are rounded once to the model's dtype, as transformers does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from forebay.errors import UsageError

__all__ = ["ROPE_TYPES", "RopeSettings", "inverse_frequencies", "rope_settings", "rope_tables", "yarn_mscale"]

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")


@dataclass(frozen=True)
class RopeSettings:
    """One kind of rotary embedding.

    Args:
        rope_type: one of ``ROPE_TYPES``.
        theta: the base.
        dim: values of a head that rotate.
        max_positions: the checkpoint's ``max_position_embeddings``.
        values: the rest of the settings (``factor``, ``beta_fast``...).
    """

    rope_type: str
    theta: float
    dim: int
    max_positions: int
    values: Mapping[str, Any] = field(default_factory=dict)


def rope_settings(config: Mapping[str, Any], dim: int, layer_type: str | None = None) -> RopeSettings:
    """The rotary settings in a config: ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``.

    Args:
        config: the text model's config.
        dim: rotating values of a head before ``partial_rotary_factor``.
        layer_type: where the settings differ by layer type, which one.

    Raises:
        UsageError: a type we do not have.
    """
    values: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if layer_type is not None and isinstance(values.get(layer_type), Mapping):
        values = dict(values[layer_type])
    rope_type = values.get("rope_type") or values.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise UsageError(
            f"config.json asks for rotary embeddings of type {rope_type!r}", fix=f"Forebay has {', '.join(ROPE_TYPES)}"
        )
    theta = values.get("rope_theta") or config.get("rope_theta") or 10000.0
    partial = values.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    max_positions = int(config.get("max_position_embeddings") or 2048)
    if rope_type in ("yarn", "llama3") and not values.get("original_max_position_embeddings"):
        values["original_max_position_embeddings"] = config.get("original_max_position_embeddings") or max_positions
    return RopeSettings(rope_type, float(theta), int(dim * partial), max_positions, values)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Yarn's magnitude for a stretch of ``factor``: 0.1 * mscale * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(rope: RopeSettings) -> tuple[torch.Tensor, float]:
    """fp32 inverse frequencies (dim / 2,), and the factor on cosines and sines."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return plain / float(rope.values["factor"]), 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, rope.theta**exponents)
    return plain, 1.0  # dynamic scaling changes nothing up to max_position_embeddings; beyond, rope_tables refuses


def rope_tables(rope: RopeSettings, positions: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of shape (positions, dim / 2) in ``dtype``.

    Raises:
        UsageError: dynamic scaling beyond ``max_position_embeddings``: earlier tokens' keys would have to change.
    """
    if rope.rope_type == "dynamic" and positions > rope.max_positions:
        raise UsageError(
            f"a context of {positions:,} tokens needs dynamic rotary scaling, which Forebay has not",
            fix=f"--context-length {rope.max_positions}",
        )
    inv_freq, scale = inverse_frequencies(rope)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inv_freq
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _llama3(rope: RopeSettings, inv_freq: torch.Tensor) -> torch.Tensor:
    factor = rope.values["factor"]
    low, high = rope.values["low_freq_factor"], rope.values["high_freq_factor"]
    old_length = rope.values["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > old_length / low, inv_freq / factor, inv_freq)
    smooth = (old_length / wavelength - low) / (high - low)
    between = ~(wavelength < old_length / high) & ~(wavelength > old_length / low)
    return torch.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


def _yarn(rope: RopeSettings, pos_freqs: torch.Tensor) -> tuple[torch.Tensor, float]:
    values, dim = rope.values, rope.dim
    old_length = values["original_max_position_embeddings"]
    factor = values.get("factor") or rope.max_positions / old_length
    scale = values.get("attention_factor")
    if scale is None:
        mscale, mscale_all = values.get("mscale"), values.get("mscale_all_dim")
        if mscale and mscale_all:
            scale = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
        else:
            scale = yarn_mscale(factor)

    def correction(rotations: float) -> float:
        return (dim * math.log(old_length / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = correction(values.get("beta_fast") or 32), correction(values.get("beta_slow") or 1)
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return (1.0 / (factor * pos_freqs)) * (1 - keep) + (1.0 / pos_freqs) * keep, float(scale)
