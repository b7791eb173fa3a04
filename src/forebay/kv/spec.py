"""What one page of KV cache is: layer groups x parts x heads x values.

Grouped-query attention has parts ``k`` and ``v``; multi-head latent attention has one part, ``latent`` (the compressed
vector and the rotary key, stored once for all heads, so replicated on every rank). A sliding-window model has two
groups, one of them with a ``window``. The planner's sizes and the engine's pools both come from here.

The canonical order of a page's bytes, used in the host tier and on disk, is, for each group,

    [layer][part][head][token in page][value]

which does not depend on the number of ranks: a rank's share of a layer's part is a number of whole heads in a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import UsageError

__all__ = ["KVSpec", "LayerGroup", "Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """One array that a layer keeps, with one entry per token.

    Args:
        name: ``k``, ``v``, ``latent``...
        heads: heads over all ranks together (1 for a latent).
        dim: values per head per token.
        value_bytes: bytes per value (2 for bf16).
    """

    name: str
    heads: int
    dim: int
    value_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token per layer, one copy of every head."""
        return self.heads * self.dim * self.value_bytes

    def heads_per_rank(self, tp: int) -> int:
        """Heads on each of ``tp`` ranks: a share, or one replicated head where there are fewer heads than ranks."""
        if self.heads >= tp:
            if self.heads % tp:
                raise UsageError(f"{self.heads} KV heads cannot be divided over {tp} ranks")
            return self.heads // tp
        if tp % self.heads:
            raise UsageError(f"{tp} ranks cannot share {self.heads} KV heads evenly")
        return 1

    def first_head(self, rank: int, tp: int) -> int:
        """The first head that ``rank`` holds."""
        return rank * self.heads // tp


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose pages are allocated and freed together.

    Args:
        name: ``full``, ``sliding``, ``latent``...
        layers: the model's layer numbers in this group, ascending.
        parts: the arrays of each of these layers.
        window: tokens that can still be read (including the token itself); None: all of them.
    """

    name: str
    layers: tuple[int, ...]
    parts: tuple[Part, ...]
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token over the group's layers, one copy of every head."""
        return len(self.layers) * sum(p.bytes_per_token for p in self.parts)

    def bytes_per_token_per_rank(self, tp: int) -> int:
        """Bytes per token in the device pool of one of ``tp`` ranks."""
        return len(self.layers) * sum(p.heads_per_rank(tp) * p.dim * p.value_bytes for p in self.parts)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The whole model's page: its groups, and the number of token slots per page."""

    groups: tuple[LayerGroup, ...]
    page_size: int

    @property
    def num_layers(self) -> int:
        return sum(len(g.layers) for g in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token, one copy of every head, as in the host and disk tiers."""
        return sum(g.bytes_per_token for g in self.groups)

    def bytes_per_token_per_rank(self, tp: int) -> int:
        """Bytes per token in one rank's device pool."""
        return sum(g.bytes_per_token_per_rank(tp) for g in self.groups)

    def page_bytes(self, group: int) -> int:
        """Bytes of one page of ``group`` in the host and disk tiers (one copy of every head)."""
        return self.groups[group].bytes_per_token * self.page_size

    def page_bytes_per_rank(self, group: int, tp: int) -> int:
        """Bytes of one page of ``group`` in one rank's device pool."""
        return self.groups[group].bytes_per_token_per_rank(tp) * self.page_size
