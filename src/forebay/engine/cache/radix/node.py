"""What the tree is made of: a node a page, a slot a layer group of it, a copy a tier of that.

A node *is* the slot of its model's first layer group, so that the usual model (one group) needs one object a page.
"""

from __future__ import annotations

from typing import Any, Union

__all__ = ["CachedPage", "Children", "Edge", "Node", "Slot"]


class CachedPage:
    """One page's bytes of one layer group in one tier, and its place among the evictable copies of that pool."""

    __slots__ = ("arriving", "next", "node", "page", "prev", "rank", "readers", "since")

    arriving: Any
    """The transfer that fills it, until it is complete; None: it may be read."""
    readers: int
    """Transfers that read it without holding its slot; it is not freed while there are any."""
    prev: CachedPage | None
    """Not None exactly while it is in an eviction queue."""
    next: CachedPage | None
    """Set while it is in a queue, as are the next two."""
    rank: float
    """The eviction policy's own mark."""
    since: float
    """When it was last used (the cache's clock)."""

    def __init__(self, node: Node, page: int) -> None:
        # Fields that are only read while it is queued are set when it is: this runs for every new page.
        self.node = node
        self.page = page
        self.arriving = None
        self.readers = 0
        self.prev = None


class Slot:
    """One layer group of one page: which tiers have it, and how many leases and transfers hold it.

    While ``lock`` is not 0 none of its copies is in an eviction queue. While it is 0 all are, but for two kinds: one
    still arriving, and one whose turn to go has come while a transfer reads it (*parked*: it goes when that ends).
    """

    __slots__ = ("device", "host", "lock")

    def __init__(self) -> None:
        self.device: CachedPage | None = None
        self.host: CachedPage | None = None
        self.lock = 0


Children = Union[None, "Node", dict[bytes, "Node"]]


class Node(Slot):
    """One page of tokens after a given prefix.

    ``children`` is None, the only child itself, or a dict: most pages of a chat have one continuation, and a dict for
    each of them would take more memory than the rest of the node.
    """

    __slots__ = ("children", "depth", "digest", "extra", "hits", "key", "parent", "run")

    def __init__(self, parent: Node | None, key: bytes, extra_groups: int = 0) -> None:
        # Slot's three fields are set here: a call to its constructor would be a tenth of an insertion.
        self.device = None
        self.host = None
        self.lock = 0
        self.parent = parent
        self.key = key
        self.depth: int = parent.depth + 1 if parent is not None else -1
        """Page number in the sequence; the root is -1."""
        self.children: Children = None
        self.run: Edge | None = None
        """The run that it is in, if it is in one."""
        self.digest: bytes | None = None
        """Hash chain up to and with this page; set when the disk tier asks for it."""
        self.hits = 0
        """Leases that computed or used it."""
        self.extra: tuple[Slot, ...] = tuple(Slot() for _ in range(extra_groups)) if extra_groups else ()

    def slot(self, group: int) -> Slot:
        """The slot of layer group ``group``."""
        return self.extra[group - 1] if group else self

    def has_copies(self) -> bool:
        """True while any group has a copy in the device or host tier, or is held."""
        if self.device is not None or self.host is not None or self.lock:
            return True
        return any(s.device is not None or s.host is not None or s.lock for s in self.extra)


class Edge:
    """Pages that were added one after the other: each is the next one's parent. ``data`` is their keys, joined.

    A prefix is compared with all of them at once. Branches change nothing, they hang on other children; what is removed
    is always the last, because a node with children stays.
    """

    __slots__ = ("data", "nodes")

    def __init__(self, data: bytearray, nodes: list[Node]) -> None:
        self.data = data
        self.nodes = nodes
