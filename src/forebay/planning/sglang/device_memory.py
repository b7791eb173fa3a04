"""SGLang's device arithmetic: bytes a token, the static fraction, the split of hybrid pools (0.5.23,
paths under sglang/srt).

- Bytes a token: ``model_executor/pool_configurator.py`` ``DefaultPoolConfigurator._compute_cell_size``.
- Static fraction: ``arg_groups/memory_hook.py`` ``handle_gpu_memory_settings``.
- Budget: ``mem_cache/kv_cache_configurator.py`` ``_profile_available_bytes``: free memory before loading x fraction,
less what
  loading took.
- Sliding windows: ``HybridSWAPoolConfigurator``; Mamba and linear attention: ``_handle_max_mamba_cache``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forebay.causes import Cause
from forebay.errors import UsageError
from forebay.kv.geometry_spec import INDEX_SCALE_BYTES, state_bytes_per_request
from forebay.model.geometry import LayerKind, LayerShape, ModelGeometry

__all__ = [
    "DevicePoolSize",
    "KVBytesPerToken",
    "Layout",
    "WeightLoad",
    "cell",
    "default_static_fraction",
    "device_pool",
    "largest_static_fraction",
    "reserved_mib",
]

_MIB = 2**20
_FP8 = ("fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "fp8")
_QUANT_BLOCK = 128  # DSATokenToKVPool.quant_block_size
_MAMBA_RATIO = 0.9
_SWA_RATIO = 0.8


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks are arranged."""

    tp: int
    dp: int
    pp: int
    attention_dp: int
    """Groups the attention is divided into (DP attention); 1: none."""
    nodes: int

    @property
    def attention_tp(self) -> int:
        return self.tp // self.attention_dp

    @property
    def replicas(self) -> int:
        """Engines beside each other: data parallelism that is not DP attention."""
        return self.dp if self.attention_dp == 1 else 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.replicas

    @property
    def ranks_per_host(self) -> int:
        return max(1, self.ranks // max(1, self.nodes))


@dataclass(frozen=True, slots=True)
class KVBytesPerToken:
    """Bytes one token takes on one rank.

    Args:
        full_bytes: in the layers that keep every token, without the index.
        window_bytes: in the sliding-window layers.
        index_bytes: of the sparse-attention index.
        state_bytes: recurrent state a request, all layers.
    """

    full_bytes: int
    window_bytes: int
    index_bytes: int
    state_bytes: int

    @property
    def device_bytes(self) -> int:
        """What a token of every layer takes together."""
        return self.full_bytes + self.window_bytes + self.index_bytes


def cell(geometry: ModelGeometry, attention_tp: int, pp: int = 1, kv_dtype: str | None = None) -> KVBytesPerToken:
    """The bytes a token of ``geometry`` with KV in ``kv_dtype`` (None or ``auto``: the model's).

    Layers that share another's KV (Gemma 3n, 4) get their slots too: SGLang counts ``num_effective_layers``, which is
    all layers of the stage. Under pipeline parallelism the fullest stage counts.
    """
    name = (kv_dtype or "auto").removeprefix("torch.")
    full = window = index = 0
    for shape in geometry.layers:
        if not shape.kv_heads:
            continue
        size = _layer_bytes(shape, geometry, attention_tp, name)
        if shape.window is not None:
            window += size
        else:
            full += size
        index += shape.index_dim + INDEX_SCALE_BYTES * (shape.index_dim // _QUANT_BLOCK) if shape.index_dim else 0
    stages = max(1, pp)
    state = state_bytes_per_request(geometry, attention_tp)
    parts = (-(-part // stages) for part in (full, window, index, state.total))
    return KVBytesPerToken(*parts)


def _layer_bytes(shape: LayerShape, geometry: ModelGeometry, tp: int, name: str) -> int:
    if shape.kind is LayerKind.LATENT:
        return _latent_bytes(shape, geometry, name)
    values = max(1, shape.kv_heads // tp) * (shape.key_dim + shape.value_dim)
    if name in ("auto", "bfloat16", "float16", "bf16"):
        return values * (geometry.dtype_bytes if name == "auto" else 2)
    if name in _FP8:
        return values
    if name in ("fp4_e2m1", "nvfp4"):  # two values a byte and one scale byte for 16
        return values // 2 + values // 16
    if name == "mxfp8":
        return values + values // 32
    raise UsageError(f"--kv-dtype {name!r} is not known to SGLang", code=Cause.BAD_FLAG)


def _latent_bytes(shape: LayerShape, geometry: ModelGeometry, name: str) -> int:
    """``calculate_mla_kv_cache_dim``; with the sparse index and fp8_e4m3,
    scales and an unquantized rotary key are kept.
    """
    rank = geometry.latent_rank or 0
    if name in ("auto", "bfloat16", "float16", "bf16"):
        return shape.key_dim * (geometry.dtype_bytes if name == "auto" else 2)
    if name in ("fp8_e4m3", "float8_e4m3fn", "fp8") and shape.index_dim:
        return rank + rank // _QUANT_BLOCK * 4 + (shape.key_dim - rank) * 2
    if name in _FP8:
        return shape.key_dim
    if name in ("fp4_e2m1", "nvfp4"):
        return shape.key_dim // 2 + shape.key_dim // 16
    raise UsageError(f"--kv-dtype {name!r} is not known to SGLang", code=Cause.BAD_FLAG)


@dataclass(frozen=True, slots=True)
class WeightLoad:
    """What the static fraction's default depends on."""

    gpu_mib: float
    tp: int
    pp: int
    attention_dp: int
    latent: bool
    vision: tuple[int, int] | None
    chunked_prefill: int | None = None
    graph_batch: int | None = None
    max_running: int | None = None
    graphs: bool = True


def _defaults(load: WeightLoad) -> tuple[int, int]:
    """(chunked prefill tokens, largest graph batch) by GPU size, as ``handle_gpu_memory_settings`` picks them."""
    large = 0 if load.tp < 4 else 1
    for below_gib, chunk, batches in (
        (20, 2048, (8, 8)),
        (35, 4096, (48, 160)),
        (60, 4096, (32, 160)),
        (160, 8192, (256, 512)),
    ):
        if load.gpu_mib < below_gib * 1024:
            found = chunk, batches[large]
            break
    else:
        found = 16384, 512
    chunk = load.chunked_prefill if load.chunked_prefill and load.chunked_prefill > 0 else found[0]
    batch = load.graph_batch or (min(found[1], load.max_running) if load.max_running else found[1])
    return chunk, batch


def reserved_mib(load: WeightLoad) -> float:
    """MiB SGLang leaves for activations, graphs and metadata when no fraction is given."""
    chunk, batch = _defaults(load)
    reserved = 512 + max(chunk, 2048) * 1.5 + load.tp * load.pp / 8 * 1024
    if load.graphs:
        reserved += batch * 2
        if load.attention_dp > 1:
            reserved += batch * load.attention_dp * 3
            if batch > 300:
                reserved += batch * load.attention_dp * 1.5
        reserved += 1.5 * 1024 if load.latent else _prefill_graphs(chunk) * 8
    return max(reserved, 10 * 1024) if load.gpu_mib > 60 * 1024 else reserved


def _prefill_graphs(largest: int) -> int:
    """How many prefill graphs are captured (``generate_prefill_cuda_graph_batch_sizes``)."""
    sizes = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
    sizes += [*range(1280, 4097, 256), *range(4608, largest + 1, 512)]
    return sum(size <= largest for size in sizes)


def largest_static_fraction(load: WeightLoad) -> float:
    """The most a static share can be: the reserve of the smallest chunk (2,048 tokens) and no graphs."""
    least = 512 + 2048 * 1.5 + load.tp * load.pp / 8 * 1024
    return math.floor((load.gpu_mib - least) / load.gpu_mib * 1000) / 1000


def default_static_fraction(load: WeightLoad) -> float:
    """``--mem-fraction-static`` when it is not given."""
    fraction = round((load.gpu_mib - reserved_mib(load)) / load.gpu_mib, 3)
    if load.vision is None:
        return fraction
    layers, hidden = load.vision  # a larger vision tower than ViT-L (24 x 1024) takes more away
    growth = layers * hidden**2 / (24 * 1024**2) - 1
    return fraction * 0.95 * max(0.8, min(1.05, 1 - 0.1 * growth))


@dataclass(frozen=True, slots=True)
class DevicePoolSize:
    """One rank's pools. ``window_tokens`` is None without sliding windows, ``state_slots`` without recurrent layers."""

    tokens: int
    kv_bytes: int
    window_tokens: int | None = None
    state_slots: int | None = None
    state_bytes: int = 0


def device_pool(
    budget: int,
    size: KVBytesPerToken,
    page_size: int,
    *,
    cap: int | None = None,
    swa_ratio: float | None = None,
    mamba_ratio: float | None = None,
    max_states: int | None = None,
) -> DevicePoolSize:
    """Pools that ``budget`` bytes hold, rounded down to pages as SGLang rounds.

    Args:
        cap: ``--max-total-tokens``.
        max_states: ``--max-mamba-cache-size``.
    """
    slots, state_bytes = None, 0
    if size.state_bytes:
        ratio = _MAMBA_RATIO if mamba_ratio is None else mamba_ratio
        slots = max_states or max(0, int((budget * ratio / (1 + ratio) - size.state_bytes) // size.state_bytes))
        state_bytes = (slots + 1) * size.state_bytes
        budget -= state_bytes
    full = size.full_bytes + size.index_bytes
    ratio = (_SWA_RATIO if swa_ratio is None else swa_ratio) if size.window_bytes else 0.0
    unit = full + ratio * size.window_bytes if full else size.window_bytes
    tokens = max(0, int(budget // unit)) if unit else 0
    tokens = min(tokens, cap) if cap is not None else tokens
    tokens = tokens // page_size * page_size
    window = int(tokens * ratio) // page_size * page_size if size.window_bytes and full else None
    kv_bytes = tokens * full + (window or 0) * size.window_bytes if full else tokens * size.window_bytes
    return DevicePoolSize(tokens, kv_bytes, window, slots, state_bytes)
