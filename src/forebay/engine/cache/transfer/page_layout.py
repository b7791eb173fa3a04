"""Where a rank's bytes are inside a canonical page: [layer][part][head][token][value] (see kv/spec.py)."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.kv.spec import KVSpec

__all__ = ["GroupLayout", "HeadSlice", "group_layouts"]


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """One rank's run of whole heads of one part, the same in each layer.

    Args:
        offset: bytes from the start of the layer in a canonical page.
        nbytes: bytes of the run, which is also the device's page stride for this part.
        writes: this rank is the one that writes it to the host (replicated heads have one writer).
    """

    offset: int
    nbytes: int
    writes: bool


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One group's canonical page as one rank sees it."""

    layers: tuple[int, ...]
    """The model's layer numbers."""
    layer_bytes: int
    """Bytes of one layer in the canonical page, all heads."""
    shares: tuple[HeadSlice, ...]
    """By part."""

    @property
    def page_bytes(self) -> int:
        return self.layer_bytes * len(self.layers)


def group_layouts(spec: KVSpec, rank: int, tp: int) -> tuple[GroupLayout, ...]:
    """The layouts of ``spec``'s groups for ``rank`` of ``tp``."""
    layouts = []
    for group in spec.groups:
        shares, start = [], 0
        for part in group.parts:
            head_bytes = spec.page_size * part.dim * part.value_bytes
            first = part.first_head(rank, tp)
            writes = part.heads >= tp or rank % (tp // part.heads) == 0
            shares.append(HeadSlice(start + first * head_bytes, part.heads_per_rank(tp) * head_bytes, writes))
            start += part.heads * head_bytes
        layouts.append(GroupLayout(group.layers, start, tuple(shares)))
    return tuple(layouts)
