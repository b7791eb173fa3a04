"""From a model's geometry to its page: what a token keeps in the cache, by layer group.

Grouped-query layers keep a key and a value per KV head (sharded over ranks; replicated where there are fewer heads
than ranks). Latent layers keep one compressed vector with its rotary key, the same on every rank, and with DeepSeek's
sparse attention one index key per token. Layers that share another layer's KV keep nothing; recurrent layers keep a
state per request.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import UsageError
from forebay.kv.spec import KVSpec, LayerGroup, Part
from forebay.model.geometry import LayerKind, LayerShape, ModelGeometry

__all__ = ["INDEX_SCALE_BYTES", "StateBytes", "kv_spec", "state_bytes_per_request"]

INDEX_SCALE_BYTES = 4
"""DeepSeek V3.2's index key is 128 fp8 values and one float32 scale per token (SGLang ``IndexBufAccessor``:
132 bytes).
"""


def kv_spec(geometry: ModelGeometry, page_size: int, value_bytes: int | None = None) -> KVSpec:
    """The page of ``geometry``: layers with equal shapes form a group, in the order they first appear.

    Args:
        geometry: the model.
        page_size: token slots per page.
        value_bytes: bytes per KV value; None: the checkpoint's dtype.

    Raises:
        UsageError: no layer keeps KV.
    """
    value_bytes = geometry.dtype_bytes if value_bytes is None else value_bytes
    members: dict[LayerShape, list[int]] = {}
    for index, shape in enumerate(geometry.layers):
        if shape.kv_heads and shape.kind is not LayerKind.SHARED:
            members.setdefault(shape, []).append(index)
    if not members:
        raise UsageError(f"{geometry.source}: no layer keeps a KV cache, there is nothing to page")
    groups: list[LayerGroup] = []
    for shape, layers in members.items():
        name = shape.kind.value
        repeats = sum(group.name.split("_")[0] == name for group in groups)
        name = f"{name}_{repeats + 1}" if repeats else name
        groups.append(LayerGroup(name, tuple(layers), _parts(shape, value_bytes), shape.window))
    return KVSpec(tuple(groups), page_size)


def _parts(shape: LayerShape, value_bytes: int) -> tuple[Part, ...]:
    if shape.kind is LayerKind.LATENT:
        latent = Part("latent", 1, shape.key_dim, value_bytes)
        if not shape.index_dim:
            return (latent,)
        return (latent, Part("index", 1, shape.index_dim + INDEX_SCALE_BYTES, 1))
    return (
        Part("k", shape.kv_heads, shape.key_dim, value_bytes),
        Part("v", shape.kv_heads, shape.value_dim, value_bytes),
    )


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of recurrent state per request on one rank, over all layers."""

    conv_bytes: int
    recurrent_bytes: int

    @property
    def total(self) -> int:
        return self.conv_bytes + self.recurrent_bytes


def state_bytes_per_request(
    geometry: ModelGeometry, tp: int, *, conv_value_bytes: int = 2, state_value_bytes: int = 4
) -> StateBytes:
    """The state of linear-attention and Mamba layers, sharded over ``tp`` ranks by heads.

    Args:
        conv_value_bytes: the model's dtype in both servers.
        state_value_bytes: float32 in SGLang (``mamba_ssm_dtype``) and by default for these models.
    """
    conv = state = 0
    for shape in geometry.layers:
        if shape.recurrent is not None:
            conv += shape.recurrent.conv_channels * (shape.recurrent.conv_kernel - 1)
            state += shape.recurrent.state_values
    return StateBytes(conv * conv_value_bytes // tp, state * state_value_bytes // tp)
