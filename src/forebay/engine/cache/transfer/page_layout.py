"""Where a rank's bytes are in a canonical page: [layer][part][head][token][value] (see kv/spec.py)."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.kv.spec import KVSpec

__all__ = ["GroupLayout", "HeadSlice", "group_layouts"]


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """One rank's contiguous heads of one part; the same in each layer.

    Args:
        offset: bytes from the start of the layer in a canonical page.
        nbytes: bytes of these heads, which is also the device's page stride for this part.
        writes: this rank is the one that copies them to the host (replicated heads are copied by one rank).
    """

    offset: int
    nbytes: int
    writes: bool


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One group's canonical page as one rank uses it."""

    layers: tuple[int, ...]
    """The model's layer numbers."""
    layer_bytes: int
    """Bytes per layer in the canonical page, all heads."""
    slices: tuple[HeadSlice, ...]
    """By part."""


def group_layouts(spec: KVSpec, rank: int, tp: int) -> tuple[GroupLayout, ...]:
    """The layouts of ``spec``'s groups for ``rank`` of ``tp``."""
    layouts = []
    for group in spec.groups:
        slices, start = [], 0
        for part in group.parts:
            head_bytes = spec.page_size * part.dim * part.value_bytes
            first = part.first_head(rank, tp)
            writes = part.heads >= tp or rank % (tp // part.heads) == 0
            slices.append(HeadSlice(start + first * head_bytes, part.heads_per_rank(tp) * head_bytes, writes))
            start += part.heads * head_bytes
        layouts.append(GroupLayout(group.layers, start, tuple(slices)))
    return tuple(layouts)
