"""How a checkpoint's weights are packed, read from its ``quantization_config``: bits a weight, and what is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forebay.model.config_fields import ConfigFields

__all__ = ["Quantization", "read_quantization"]


@dataclass(frozen=True, slots=True)
class Quantization:
    """Packed weights.

    Args:
        method: ``fp8``, ``compressed-tensors``, ``mxfp4``, ``gptq``, ``awq``, ``modelopt``...
        weight_bits: bits a packed weight.
        scale_bytes_per_weight: bytes of scales (and zero points) a packed weight.
        experts_only: only the routed experts are packed; attention, shared experts, dense layers and head are not.
        kv_bits: bits a KV value where the checkpoint asks for a quantized KV cache, else None.
    """

    method: str
    weight_bits: int
    scale_bytes_per_weight: float
    experts_only: bool
    kv_bits: int | None = None

    @property
    def bytes_per_weight(self) -> float:
        """Bytes a packed weight with its share of the scales."""
        return self.weight_bits / 8 + self.scale_bytes_per_weight


def read_quantization(config: ConfigFields) -> Quantization | None:
    """Read ``quantization_config`` (or ``compression_config``), None where the weights are plain.

    Sources: the Transformers quantization configs; DeepSeek's fp8 blocks of 128 x 128 with one float32 scale; the
    compressed-tensors format of Kimi-K2.5 (groups of 32, one bf16 scale); gpt-oss's MXFP4 (blocks of 32, one byte).
    """
    name = next((n for n in ("quantization_config", "compression_config") if n in config), None)
    if name is None:
        return None
    fields = config.child(name)
    method = fields.text("quant_method", "compressed-tensors" if "config_groups" in fields else "unknown")
    if method == "fp8":
        block = fields.integers("weight_block_size")
        scale = 4 / (block[0] * block[1]) if len(block) == 2 and min(block) > 0 else 0.0
        return Quantization(method, 8, scale, experts_only=False)
    if method == "mxfp4":
        return Quantization(method, 4, 1 / 32, experts_only=True)
    if method in ("gptq", "awq", "auto-round"):
        bits, group = fields.integer("bits", "w_bit", default=4), _group(fields.values.get("group_size"), 128)
        return Quantization(method, bits, (2 + bits / 8) / group, experts_only=False)
    if method == "compressed-tensors":
        return _read_compressed(fields)
    if method == "modelopt":
        algorithm = str(fields.values.get("quant_algo") or fields.values.get("kv_cache_scheme") or "FP8").upper()
        return Quantization(method, 4, 1 / 16, False) if "FP4" in algorithm else Quantization(method, 8, 0.0, False)
    if method == "bitsandbytes":
        return Quantization(method, 4 if fields.flag("load_in_4bit") else 8, 0.0, experts_only=False)
    return Quantization(method, 8, 0.0, experts_only=False)


def _group(value: Any, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default


def _read_compressed(fields: ConfigFields) -> Quantization:
    """compressed-tensors: the first group's weights say bits and group size; ``ignore`` says what stays plain."""
    groups = fields.values.get("config_groups") or {}
    weights: dict[str, Any] = next((g.get("weights") or {} for g in groups.values() if isinstance(g, dict)), {})
    bits = weights.get("num_bits", 8)
    group = weights.get("group_size")
    scale = 2 / group if isinstance(group, int) and group > 0 else 0.0
    ignored = " ".join(str(item) for item in fields.values.get("ignore") or [])
    experts_only = "self_attn" in ignored and "shared_experts" in ignored
    scheme = fields.values.get("kv_cache_scheme")
    kv_bits = scheme.get("num_bits") if isinstance(scheme, dict) else None
    return Quantization("compressed-tensors", bits, scale, experts_only, kv_bits)
