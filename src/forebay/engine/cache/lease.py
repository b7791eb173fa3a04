"""One sequence's hold on its pages: a path of tree nodes, followed by pages of its own that are still being filled."""

from __future__ import annotations

from typing import Any

import numpy as np

from forebay.engine.cache.interface import CachedTokens, Int32Array
from forebay.engine.cache.radix.node import Node
from forebay.engine.cache.transfer.layer_events import LoadEvents

__all__ = ["CacheLease"]


class CacheLease:
    """State of one lease; only the cache changes it.

    Pages 0 .. len(nodes) - 1 belong to the tree; the others belong to the lease, as do ``duplicates``.
    """

    __slots__ = (
        "cached",
        "closed",
        "duplicates",
        "first",
        "layer_events",
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
        """Entries in use in each group's table."""
        self.prompt_pages = 0
        """Pages of its prompt that another request with the same prompt could use."""
        self.nodes: list[Node] = []
        self.first = [0] * num_groups
        """Per group: the first page that it still holds; the window has passed the earlier ones."""
        self.duplicates: dict[tuple[int, int], int] = {}
        """(group, page number) -> device page of the lease, where the tree's page was still arriving when the lease had
        computed its own."""
        self.tiers: list[int] = []
        """Where each page of the prefix came from (DEVICE, HOST or DISK of prefix_match.py)."""
        self.cached = CachedTokens()
        self.layer_events: LoadEvents | None = None
        self.waits_for: tuple[Any, ...] = ()
        """Loads whose pages it uses."""
        self.transfers = 0
        """Transfers under way that were started for this lease. Its pages stay locked until they have ended."""
        self.closed = False

    @property
    def page_tables(self) -> list[Int32Array]:
        """Views, valid until the lease is extended."""
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
        """The device pages of ``group`` that do not belong to the tree."""
        table = self.tables[group]
        own = [int(p) for p in table[len(self.nodes) : self.num_pages] if p >= 0]
        own.extend(page for (g, _), page in self.duplicates.items() if g == group)
        return own
