"""The result of a prefix match: which pages of a sequence are in which tier."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.engine.cache.radix.node import Node

__all__ = ["DEVICE", "DISK", "HOST", "NOWHERE", "Match"]

NOWHERE, DEVICE, HOST, DISK = 0, 1, 2, 3
"""Where one page of one group is, the fastest tier that has it."""


@dataclass(slots=True)
class Match:
    """A usable prefix of ``length`` pages.

    Args:
        nodes: its nodes; fewer than ``length`` where the rest is on disk only.
        beyond: (page tokens, address) of the pages that have no node.
        where: per group, per page: DEVICE, HOST, DISK or NOWHERE.
        first: per group: the first page that can still be read.
        declined: pages that could have been loaded and are recomputed because that is faster.
    """

    length: int
    nodes: list[Node]
    beyond: list[tuple[bytes, bytes]]
    where: list[list[int]]
    first: list[int] = field(default_factory=list)
    declined: int = 0
