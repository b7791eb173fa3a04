"""vLLM's KV arithmetic: layer groups that share one pool of blocks (``v1/core/kv_cache_utils.py``, 0.32.0).

A model whose layers are all alike has one group: tokens = bytes // (block x bytes a token) x block. A hybrid model's
layers are split into groups of equal size that draw blocks from one pool; a request takes blocks in every group, and
the size vLLM prints is concurrency x ``max_model_len``: no per-token cost can be read from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forebay.causes import Cause
from forebay.errors import UsageError
from forebay.kv.geometry_spec import INDEX_SCALE_BYTES, state_bytes_per_request
from forebay.model.geometry import LayerKind, LayerShape, ModelGeometry

__all__ = ["Group", "Pool", "bytes_per_token", "groups", "largest_length", "pool"]

_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")
_PLAIN = ("bfloat16", "float16", "half", "bf16")


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with one block table.

    Args:
        layers: layers of this kind in the model.
        token_bytes: bytes a token a layer on one rank.
        window: tokens a request keeps at most; None: all.
        is_state: one block a request (recurrent layers).
    """

    layers: int
    token_bytes: int
    window: int | None = None
    is_state: bool = False


def groups(geometry: ModelGeometry, tp: int, kv_dtype: str | None) -> list[Group]:
    """The layer kinds of ``geometry``; layers that share another's KV keep nothing in vLLM."""
    found: dict[LayerShape, int] = {}
    for shape in geometry.layers:
        if shape.kv_heads and shape.kind is not LayerKind.SHARED:
            found[shape] = found.get(shape, 0) + 1
    result = [Group(count, _layer_bytes(shape, geometry, tp, kv_dtype), shape.window) for shape, count in found.items()]
    recurrent = sum(shape.recurrent is not None for shape in geometry.layers)
    if recurrent:
        state = state_bytes_per_request(geometry, tp).total
        result.append(Group(recurrent, -(-state // recurrent), is_state=True))
    return result


def _layer_bytes(shape: LayerShape, geometry: ModelGeometry, tp: int, kv_dtype: str | None) -> int:
    name = (kv_dtype or "auto").removeprefix("torch.")
    if shape.kind is LayerKind.LATENT:
        index = shape.index_dim + INDEX_SCALE_BYTES if shape.index_dim else 0
        if shape.index_dim and (name in ("fp8", "fp8_ds_mla", "auto")):
            # DeepSeek V3.2 and GLM-5 default to fp8_ds_mla: 512 fp8, 4 float32 scales, 64 bf16 of rotary key
            rank = geometry.latent_rank or 0
            return rank + rank // 128 * 4 + (shape.key_dim - rank) * 2 + index
        return shape.key_dim * _value_bytes(name, geometry) + index
    values = max(1, shape.kv_heads // tp) * (shape.key_dim + shape.value_dim)
    if name.startswith("nvfp4"):  # two values a byte and one scale byte for 16
        return values // 2 + values // 16
    return values * _value_bytes(name, geometry)


def _value_bytes(name: str, geometry: ModelGeometry) -> int:
    if name == "auto":
        return geometry.dtype_bytes
    if name in _PLAIN:
        return 2
    if name in (*_FP8, "fp8_ds_mla"):
        return 1
    raise UsageError(f"--kv-dtype {name!r} is not known to vLLM", code=Cause.BAD_FLAG)


def bytes_per_token(found: list[Group]) -> int:
    """Bytes a token in all layers of one rank."""
    return sum(group.layers * group.token_bytes for group in found if not group.is_state)


@dataclass(frozen=True, slots=True)
class Pool:
    """The device pool of one rank. ``tokens`` is what vLLM prints: concurrency x length."""

    blocks: int
    block_bytes: int
    concurrency: float
    tokens: int


def pool(found: list[Group], budget: int, block: int, length: int, in_flight: int) -> Pool:
    """The pool ``budget`` bytes make.

    Args:
        block: tokens a block.
        length: ``max_model_len``.
        in_flight: ``max_num_batched_tokens``: what a window keeps beyond itself while a chunk is computed.
    """
    split, block, page = _split(found, block)
    block_bytes = split * page
    blocks = budget // block_bytes
    needed = sum(_blocks(group, block, length, in_flight) * -(-group.layers // split) for group in found)
    concurrency = blocks / needed if needed else 0.0
    return Pool(blocks, block_bytes, concurrency, int(concurrency * length))


def _split(found: list[Group], block: int) -> tuple[int, int, int]:
    """(layers a group, tokens a block, bytes of a page of one layer),
    as ``_get_kv_cache_groups_uniform_page_size`` does.
    """
    attention = [group for group in found if not group.is_state]
    states = [group.token_bytes for group in found if group.is_state]
    if states and attention:  # the attention block grows until its page holds a state (config.py, mamba hybrids)
        widest = max(group.token_bytes for group in attention)
        block = max(block, -(-max(states) // (widest * 16)) * 16)
    pages = [group.token_bytes if group.is_state else group.token_bytes * block for group in found]
    counts = [group.layers for group in found]
    split = max(counts) if len(counts) == 1 or max(counts) < min(counts) * 1.5 else min(counts)
    return split, block, max(pages)


def _blocks(group: Group, block: int, length: int, in_flight: int) -> int:
    if group.is_state:
        return 1
    if group.window is None:
        return -(-length // block)
    return -(-min(group.window - 1 + in_flight, length) // block) + 1


def largest_length(found: list[Group], budget: int, block: int, length: int, in_flight: int) -> int:
    """The longest ``max_model_len`` one request of which fits, up to ``length``; 0: none."""
    low, high = 0, length + 1
    while low < high - 1:
        middle = (low + high) // 2
        if pool(found, budget, block, middle, in_flight).concurrency >= 1:
            low = middle
        else:
            high = middle
    return low if math.isfinite(low) else 0
