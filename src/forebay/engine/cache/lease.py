"""One sequence's hold on its pages: a path of tree nodes, then pages of its own that are still being filled."""

from __future__ import annotations

from typing import Any

import numpy as np

from forebay.engine.cache.interface import CachedTokens, Int32Array
from forebay.engine.cache.radix.node import Node

__all__ = ["CacheLease"]


class CacheLease:
    """State of one lease; only the cache changes it.

    Pages 0 .. len(nodes) - 1 are the tree's; the rest are the lease's own, as are ``duplicates``.
    """

    __slots__ = (
        "cached",
        "closed",
        "duplicates",
        "first",
        "gate",
        "nodes",
        "num_pages",
        "prompt_pages",
        "tables",
        "tiers",
        "transfers",
        "waits_for",
    )

    def __init__(self, num_groups: int, capacity: int) -> None:
        self.tables: list[Int32Array] = [np.full(capacity, -1, dtype=np.int32) for _ in range(num_groups)]
        self.num_pages = 0
        """Pages that have an entry in the tables (each group's)."""
        self.prompt_pages = 0
        """Pages of its prompt that another request with the same prompt could use."""
        self.nodes: list[Node] = []
        self.first = [0] * num_groups
        """Per group: the first page it still holds; earlier ones are outside the window."""
        self.duplicates: dict[tuple[int, int], int] = {}
        """(group, page number) -> own device page, where the tree's was still arriving when ours was finished."""
        self.tiers: list[int] = []
        """Where each page of the prefix came from (DEVICE, HOST or DISK of matching.py)."""
        self.cached = CachedTokens()
        self.gate: Any | None = None
        self.waits_for: tuple[Any, ...] = ()
        """Loads whose pages it uses."""
        self.transfers = 0
        """Transfers under way that were started for this lease; its closing waits for them."""
        self.closed = False

    @property
    def page_tables(self) -> list[Int32Array]:
        """Per group: page number -> device page; -1 where a window cannot read any more. Views:
        valid until extended.
        """
        return [table[: self.num_pages] for table in self.tables]

    def reserve(self, num_pages: int) -> None:
        """Make the tables at least ``num_pages`` long."""
        if num_pages <= len(self.tables[0]):
            return
        capacity = max(num_pages, 2 * len(self.tables[0]))
        for group, table in enumerate(self.tables):
            longer = np.full(capacity, -1, dtype=np.int32)
            longer[: self.num_pages] = table[: self.num_pages]
            self.tables[group] = longer

    def own_pages(self, group: int) -> list[int]:
        """The device pages of ``group`` that are not the tree's."""
        table = self.tables[group]
        own = [int(p) for p in table[len(self.nodes) : self.num_pages] if p >= 0]
        own.extend(page for (g, _), page in self.duplicates.items() if g == group)
        return own
