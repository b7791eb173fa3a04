"""How many weights a model has, kind by kind, and which part of each a rank holds.

Two sources, one result: the checkpoint's headers (every tensor's bytes, sorted by name), or the geometry (counts by
formula, for a model that is not on this machine). Shares follow Megatron's split, which SGLang, vLLM and the embedded
server use: query, output, MLP, experts and vocabulary are divided; KV projections are divided by head and repeated
where there are fewer heads than ranks; norms, routers, the latent's down-projections and the sparse-attention indexer
are on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from forebay.model.geometry import LayerKind, LayerShape, ModelGeometry
from forebay.model.safetensors_header import TensorInfo

__all__ = ["BESIDE", "Component", "Share", "from_geometry", "from_headers", "rank_bytes", "total_bytes"]


class Share(StrEnum):
    """What part of a component one rank holds."""

    ALL = "all"
    ATTENTION = "attention"
    """Divided over the attention ranks (fewer than all under DP attention)."""
    KV_HEADS = "kv_heads"
    TENSOR = "tensor"
    """Divided over all tensor-parallel ranks."""
    VOCABULARY = "vocabulary"
    """As TENSOR, and on the first or last pipeline stage only."""


@dataclass(frozen=True, slots=True)
class Component:
    """Weights of one kind: their bytes over all ranks."""

    name: str
    size_bytes: int
    share: Share


def total_bytes(components: Iterable[Component]) -> int:
    """Bytes of one copy of everything."""
    return sum(item.size_bytes for item in components)


def rank_bytes(components: Iterable[Component], kv_heads: int, tp: int, attention_tp: int, pp: int = 1) -> int:
    """Bytes on the fullest rank.

    Args:
        kv_heads: KV heads over all ranks.
        attention_tp: ranks the attention is divided over (``tp``, or ``tp / dp`` under DP attention).
        pp: pipeline stages; layers are divided evenly, rounded up, and the vocabulary's two ends are apart.
    """
    parts = {
        Share.ALL: 1.0,
        Share.ATTENTION: 1 / attention_tp,
        Share.KV_HEADS: 1 / min(attention_tp, max(1, kv_heads)),
        Share.TENSOR: 1 / tp,
        Share.VOCABULARY: 1 / tp,
    }
    layers = sum(item.size_bytes * parts[item.share] for item in components if item.share is not Share.VOCABULARY)
    ends = [item.size_bytes * parts[item.share] for item in components if item.share is Share.VOCABULARY]
    return round(layers / pp + (sum(ends) if pp == 1 else max(ends, default=0)))


_VOCABULARY = re.compile(r"(^|\.)(embed_tokens|lm_head|wte|token_embd|output)\.(weight|qweight)")
_KV_HEADS = re.compile(r"\.(k_proj|v_proj|key|value|attn_k|attn_v)\.")
_REPLICATED = re.compile(
    r"(norm|\.gate\.weight|\.router\.|q_a_proj|kv_a_proj|indexer|e_score_correction|attn_kv_a|attn_q_a|ffn_gate_inp|"
    r"vision|visual|mm_projector|multi_modal_projector|^patch)"
)
_ATTENTION = re.compile(r"(attn|attention)")


def share_of(name: str) -> Share:
    """The share of a tensor, by its name in any of the usual layouts."""
    if _VOCABULARY.search(name):
        return Share.VOCABULARY
    if _REPLICATED.search(name):
        return Share.ALL
    if _KV_HEADS.search(name):
        return Share.KV_HEADS
    return Share.ATTENTION if _ATTENTION.search(name) else Share.TENSOR


def from_headers(tensors: Iterable[TensorInfo], layers: int | None = None) -> list[Component]:
    """Components of a checkpoint, from every tensor's name and bytes; what not every server reads is apart,
    by ``BESIDE``.

    Args:
        layers: of the model; those from there on are draft layers (multi-token prediction).
    """
    sizes: dict[tuple[str, Share], int] = {}
    for tensor in tensors:
        share = share_of(tensor.name)
        key = (_beside(tensor.name, layers) or share.value, share)
        sizes[key] = sizes.get(key, 0) + tensor.size_bytes
    return [Component(name, size, share) for (name, share), size in sizes.items()]


BESIDE = ("vision tower", "draft layers", "shapes")
"""Names of components beside the language model: what sees images, what guesses further tokens,
and the shapes that packed tensors stand for."""
_TOWER = re.compile(r"(vision|visual|mm_projector|multi_modal_projector|^patch)")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def _beside(name: str, layers: int | None) -> str | None:
    if _TOWER.search(name):
        return BESIDE[0]
    if name.endswith(".weight_shape"):
        return BESIDE[2]
    number = _LAYER.search(name)
    return BESIDE[1] if number is not None and layers is not None and int(number[1]) >= layers else None


def from_geometry(geometry: ModelGeometry) -> list[Component]:
    """Components by formula: every matrix of every layer, in the checkpoint's packing.
    Norms and biases are left out (< 0.1 %).
    """
    plain = geometry.dtype_bytes
    quantized = geometry.quantization
    packed = quantized.bytes_per_weight if quantized else plain
    dense = plain if quantized is None or quantized.experts_only else packed
    vocabulary = geometry.vocab_size * geometry.hidden_size * (1 if geometry.tie_embeddings else 2)
    counts = {
        ("vocabulary", Share.VOCABULARY): vocabulary * plain,
        ("experts", Share.TENSOR): _experts(geometry) * packed,
        ("mlp", Share.TENSOR): _mlp(geometry) * dense,
        ("router", Share.ALL): _router(geometry) * plain,
    }
    for shape in geometry.layers:
        for share, weights in _attention(geometry, shape):
            key = ("attention", share)
            counts[key] = counts.get(key, 0) + weights * dense
    return [Component(name, round(size), share) for (name, share), size in counts.items() if size]


def _attention(geometry: ModelGeometry, shape: LayerShape) -> list[tuple[Share, int]]:
    hidden, heads = geometry.hidden_size, geometry.num_heads
    if shape.kind is LayerKind.LATENT:
        return _latent_attention(geometry, shape)
    found: list[tuple[Share, int]] = []
    if shape.recurrent is not None:
        # the convolution's channels are the projected queries, keys and values; gate and output are one value width
        # each
        width = max(shape.recurrent.conv_channels, hidden)
        found.append((Share.ATTENTION, hidden * (width + 2 * heads * geometry.head_dim)))
    if shape.kv_heads:  # layers that share KV still have their query and output
        query = heads * shape.key_dim
        gated = 2 if geometry.model_type.startswith(("qwen3_next", "qwen3_5")) else 1
        found.append((Share.ATTENTION, hidden * (gated * query + heads * shape.value_dim)))
        found.append((Share.KV_HEADS, hidden * shape.kv_heads * (shape.key_dim + shape.value_dim)))
    return found


def _latent_attention(geometry: ModelGeometry, shape: LayerShape) -> list[tuple[Share, int]]:
    hidden, heads, rank = geometry.hidden_size, geometry.num_heads, geometry.latent_rank or 0
    query_in = geometry.query_rank or hidden
    rope = shape.key_dim - rank
    down = hidden * shape.key_dim + (hidden * geometry.query_rank if geometry.query_rank else 0)
    if shape.index_dim:  # 64 (V3.2) or 32 (GLM-5) index heads; their query projection is small either way
        down += query_in * 64 * shape.index_dim + hidden * (shape.index_dim + 64)
    up = query_in * heads * geometry.query_head_dim
    up += rank * heads * (geometry.query_head_dim - rope + geometry.value_head_dim)
    up += heads * geometry.value_head_dim * hidden
    return [(Share.ALL, down), (Share.ATTENTION, up)]


def _experts(geometry: ModelGeometry) -> int:
    moe = geometry.moe
    return 0 if moe is None else len(moe.layers) * moe.experts * 3 * geometry.hidden_size * moe.expert_intermediate


def _router(geometry: ModelGeometry) -> int:
    return 0 if geometry.moe is None else len(geometry.moe.layers) * geometry.moe.experts * geometry.hidden_size


def _mlp(geometry: ModelGeometry) -> int:
    """Dense layers' MLPs and the shared experts."""
    moe = geometry.moe
    routed = moe.layers if moe else frozenset()
    dense = geometry.num_layers - len(routed)
    shared = len(routed) * (moe.shared_intermediate if moe else 0)
    return 3 * geometry.hidden_size * (dense * geometry.intermediate_size + shared)
