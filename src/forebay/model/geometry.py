"""What a model is, read from its config.json: the numbers that decide how much memory it needs.

Every layer is described by what it keeps for a token or a request, never by the model's name: grouped-query layers
(full or sliding window), latent layers (DeepSeek's compressed KV, with or without the sparse-attention index), and
recurrent layers (linear attention, Mamba) whose state has one size whatever the length. ``forebay.model.families``
reads each family's fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forebay.model.quantization import Quantization

__all__ = ["DTYPE_BYTES", "LayerKind", "LayerShape", "ModelGeometry", "MoeShape", "RecurrentShape"]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1}


class LayerKind(StrEnum):
    """What a layer keeps: KV of every token, KV of a window, a latent of every token, a state of one size,
    or nothing.
    """

    FULL = "full"
    SLIDING = "sliding"
    LATENT = "latent"
    RECURRENT = "recurrent"
    SHARED = "shared"
    """Reads another layer's KV (Gemma 3n and 4; its own shape stays,
    some servers reserve it) or has no attention at all.
    """


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """The state of a linear-attention or Mamba layer: bytes a request, whatever its length.

    Args:
        conv_channels: channels of the short convolution, over all ranks.
        conv_kernel: its length; ``conv_kernel - 1`` past values are kept a channel.
        state_values: values of the recurrent state over all ranks (heads x key dim x value dim).
    """

    conv_channels: int
    conv_kernel: int
    state_values: int


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps. Layers with equal shapes share a pool.

    Args:
        kind: see ``LayerKind``.
        kv_heads: KV heads over all ranks (1 for a latent: every rank holds all of it).
        key_dim: values a head a token of the key, or of the whole latent (compressed vector and rotary key).
        value_dim: values a head a token of the value; 0 for a latent.
        window: tokens that can be read, the token itself included; None: all.
        index_dim: values a token of the sparse-attention index key (DeepSeek V3.2); 0: none.
        recurrent: the state of a recurrent layer.
    """

    kind: LayerKind
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    index_dim: int = 0
    recurrent: RecurrentShape | None = None


@dataclass(frozen=True, slots=True)
class MoeShape:
    """A mixture of experts: which layers route, and how large an expert is."""

    experts: int
    experts_per_token: int
    expert_intermediate: int
    shared_intermediate: int
    """Width of the shared experts together; 0: none."""
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The numbers of one model. Sizes are values, not bytes, unless the name says so.

    Args:
        architecture: the class the checkpoint names (``LlamaForCausalLM``).
        model_type: Transformers' model type of the text part.
        layers: one shape a layer, in order.
        latent_rank: length of the compressed KV vector of latent layers (512 of 576 in DeepSeek); None where there are
            none.
        max_context: ``max_position_embeddings``.
        dtype: the dtype the checkpoint names, as torch spells it (``bfloat16``).
        draft_layers: multi-token-prediction layers that ship with the checkpoint.
    """

    architecture: str
    model_type: str
    source: str
    layers: tuple[LayerShape, ...]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    dtype: str
    tie_embeddings: bool
    latent_rank: int | None
    query_rank: int | None
    query_head_dim: int
    value_head_dim: int
    moe: MoeShape | None
    quantization: Quantization | None
    draft_layers: int
    vision: tuple[int, int] | None
    """Layers and hidden size of the vision tower of a multimodal checkpoint; None: text only."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def is_latent(self) -> bool:
        """Latent attention: each rank keeps the same bytes."""
        return any(layer.kind is LayerKind.LATENT for layer in self.layers)

    @property
    def has_recurrent(self) -> bool:
        return any(layer.kind is LayerKind.RECURRENT for layer in self.layers)

    def kinds(self) -> dict[LayerKind, int]:
        """Layers of each kind, in the order they first appear."""
        counts: dict[LayerKind, int] = {}
        for layer in self.layers:
            counts[layer.kind] = counts.get(layer.kind, 0) + 1
        return counts
