"""The parts of the tree: a node per page, in it a slot per layer group, in that a copy per tier.

A node *is* the slot of the first layer group, so that a model with one group (the usual case) needs one object per
page.
"""

from __future__ import annotations

from typing import Any, Union

__all__ = ["CachedPage", "Children", "Edge", "Node", "Slot"]


class CachedPage:
    """One page of one layer group in one tier, and its place among the evictable copies of that pool."""

    __slots__ = ("arriving", "next", "node", "page", "prev", "rank", "readers", "since")

    arriving: Any
    """The transfer that fills it, until that is complete; None: it may be read."""
    readers: int
    """Number of transfers that read it without locking its slot; it is not freed before they end."""
    prev: CachedPage | None
    """Not None exactly while it is in an eviction queue."""
    next: CachedPage | None
    """Set while it is in a queue, as are the next two."""
    rank: float
    """Used by the eviction policy."""
    since: float
    """When it was last used (the cache's clock)."""

    def __init__(self, node: Node, page: int) -> None:
        # Fields that are read only while it is queued are set when it is queued: this runs for every new page.
        self.node = node
        self.page = page
        self.arriving = None
        self.readers = 0
        self.prev = None


class Slot:
    """One layer group of one page: which tiers have it, and how many leases and transfers lock it.

    While ``lock_ref`` is not 0, none of its copies is in an eviction queue. While it is 0, all are, with two
    exceptions: a copy that is still arriving, and a copy that was evicted while a transfer reads it (it is freed when
    that ends).
    """

    __slots__ = ("device", "host", "lock_ref")

    def __init__(self) -> None:
        self.device: CachedPage | None = None
        self.host: CachedPage | None = None
        self.lock_ref = 0


Children = Union[None, "Node", dict[bytes, "Node"]]


class Node(Slot):
    """One page of tokens after a given prefix.

    ``children`` is None, the only child itself, or a dict. Most pages of a chat have one child, and a dict for each
    would take more memory than the rest of the node.
    """

    __slots__ = ("children", "depth", "digest", "edge", "extra", "hits", "key", "parent")

    def __init__(self, parent: Node | None, key: bytes, extra_groups: int = 0) -> None:
        # Slot's three fields are set here: a call to its constructor would be a tenth of an insertion.
        self.device = None
        self.host = None
        self.lock_ref = 0
        self.parent = parent
        self.key = key
        self.depth: int = parent.depth + 1 if parent is not None else -1
        """Page number in the sequence; the root is -1."""
        self.children: Children = None
        self.edge: Edge | None = None
        """The edge that it is in, if it is in one."""
        self.digest: bytes | None = None
        """Content address: the hash chain up to and including this page; only with a disk tier."""
        self.hits = 0
        """Number of leases that computed or used it."""
        self.extra: tuple[Slot, ...] = tuple(Slot() for _ in range(extra_groups)) if extra_groups else ()

    def slot(self, group: int) -> Slot:
        """The slot of layer group ``group``."""
        return self.extra[group - 1] if group else self

    def has_copies(self) -> bool:
        """True while any group has a copy in the device or host tier, or is locked."""
        if self.device is not None or self.host is not None or self.lock_ref:
            return True
        return any(s.device is not None or s.host is not None or s.lock_ref for s in self.extra)


class Edge:
    """A chain of pages that were inserted one after the other: each is the parent of the next. ``data`` is their
    keys, joined.

    A prefix is compared with all of them at once. A branch does not split an edge: it is another child of one of its
    nodes. Only the last node of an edge is ever removed, because a node with children stays.
    """

    __slots__ = ("data", "nodes")

    def __init__(self, data: bytearray, nodes: list[Node]) -> None:
        self.data = data
        self.nodes = nodes
