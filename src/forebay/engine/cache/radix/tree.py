"""The radix tree over pages. A child's key is its page's token bytes: one comparison or dict lookup per level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from forebay.engine.cache.interface import Int32Array
from forebay.engine.cache.radix.native_radix import native_radix
from forebay.engine.cache.radix.node import Edge, Node

__all__ = ["PageTree", "token_bytes"]


def token_bytes(tokens: Int32Array) -> bytes:
    """The tokens as bytes (int32, little-endian), of which keys are slices."""
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


class PageTree:
    """Nodes by prefix. It holds the structure only; the cache decides which nodes are removed.

    Args:
        page_size: tokens per page.
        num_groups: layer groups of the model.
    """

    def __init__(self, page_size: int, num_groups: int = 1) -> None:
        self.key_bytes = 4 * page_size
        self._extra = num_groups - 1
        self._native = native_radix()
        self.root = Node(None, b"", self._extra)
        self.num_nodes = 0

    def walk(self, data: bytes, max_pages: int) -> list[Node]:
        """The nodes of the longest prefix of ``data`` that has any, at most ``max_pages``. Nothing is changed."""
        step = self.key_bytes
        node: Node | None = self.root
        path: list[Node] = []
        append = path.append
        start, end = 0, max_pages * step
        while start < end:
            children = node.children  # type: ignore[union-attr]
            if children is None:
                break
            if children.__class__ is Node:
                if children.key != data[start : start + step]:
                    break
                node = children
            else:
                node = children.get(data[start : start + step])  # type: ignore[union-attr]
                if node is None:
                    break
            edge = node.edge
            if edge is not None and edge.nodes[0] is node:
                if self._native is not None:
                    count = self._native.common_prefix_len(edge, data, start, end, step)
                else:
                    count = _common_prefix_len(edge, data[start:end], step)
                path += edge.nodes[:count]
                node = path[-1]
                start += count * step
            else:
                append(node)
                start += step
        return path

    def child(self, parent: Node, key: bytes) -> Node | None:
        """The child of ``parent`` for this page, or None."""
        children = parent.children
        if children is None:
            return None
        if isinstance(children, Node):
            return children if children.key == key else None
        return children.get(key)

    def add(self, parent: Node, key: bytes) -> Node:
        """A new node under ``parent``, which has none for ``key`` yet."""
        node = Node(parent, key, self._extra)
        children = parent.children
        if children is None:
            parent.children = node
        elif isinstance(children, Node):
            parent.children = {children.key: children, key: node}
        else:
            children[key] = node
        self.num_nodes += 1
        return node

    def edge_for(self, parent: Node, keys: Sequence[bytes]) -> Edge:
        """The edge for new pages under ``parent``, which has no children. The caller adds the nodes to it."""
        edge = parent.edge
        if edge is None or edge.nodes[-1] is not parent:
            edge = Edge(bytearray(), [])
        edge.data += b"".join(keys)
        self.num_nodes += len(keys)
        return edge

    def prune(self, node: Node) -> None:
        """Remove ``node`` if it has neither copies nor children, then its parents as long as that is true of them."""
        while node.children is None and not (
            node.lock_ref or node.device is not None or node.host is not None or (node.extra and node.has_copies())
        ):
            parent = node.parent
            if parent is None:
                return
            siblings = parent.children
            if siblings is node:
                parent.children = None
            else:
                assert isinstance(siblings, dict), "a node is missing from its parent's children"
                del siblings[node.key]
                if not siblings:
                    parent.children = None
            node.parent = None
            edge = node.edge
            if edge is not None:
                edge.nodes.pop()
                del edge.data[-self.key_bytes :]
                node.edge = None
            self.num_nodes -= 1
            node = parent

    def nodes(self) -> Iterator[Node]:
        """Every node except the root, parents first. O(tree), for checks and reports."""
        pending = [self.root]
        while pending:
            children = pending.pop().children
            found = [] if children is None else [children] if isinstance(children, Node) else list(children.values())
            yield from found
            pending.extend(found)


def _common_prefix_len(edge: Edge, data: bytes, step: int) -> int:
    """How many pages ``edge`` and ``data`` have in common from the start."""
    low, high = 0, min(len(edge.nodes), len(data) // step)
    if edge.data[: high * step] == data[: high * step]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if edge.data[low * step : middle * step] == data[low * step : middle * step]:
            low = middle
        else:
            high = middle
    return low
