"""The radix tree over pages. A child's key is its page's token bytes,
so a step down is one comparison or dict lookup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from forebay.engine.cache.interface import Int32Array
from forebay.engine.cache.radix.native_radix import native_radix
from forebay.engine.cache.radix.node import Edge, Node

__all__ = ["PageTree", "token_bytes"]


def token_bytes(tokens: Int32Array) -> bytes:
    """The tokens as the bytes that keys are cut from (int32, this machine's byte order is little-endian everywhere)."""
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


class PageTree:
    """Nodes by prefix. It holds structure only; who may be removed is the cache's decision.

    Args:
        page_size: tokens a page.
        num_groups: layer groups of the model.
    """

    def __init__(self, page_size: int, num_groups: int = 1) -> None:
        self.key_bytes = 4 * page_size
        self._extra = num_groups - 1
        self._passes = native_radix()
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
            run = node.run
            if run is not None and run.nodes[0] is node:
                if self._passes is not None:
                    count = self._passes.alike(run, data, start, end, step)
                else:
                    count = _pages_alike(run, data[start:end], step)
                path += run.nodes[:count]
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

    def row(self, parent: Node, keys: Sequence[bytes]) -> Edge:
        """The run that new pages under ``parent``, which has no children, belong to.
        The caller adds the nodes to it.
        """
        run = parent.run
        if run is None or run.nodes[-1] is not parent:
            run = Edge(bytearray(), [])
        run.data += b"".join(keys)
        self.num_nodes += len(keys)
        return run

    def prune(self, node: Node) -> None:
        """Remove ``node`` if it has neither copies nor children,
        then its parents for as long as that is true of them.
        """
        while node.children is None and not (
            node.lock or node.device is not None or node.host is not None or (node.extra and node.has_copies())
        ):
            parent = node.parent
            if parent is None:
                return
            siblings = parent.children
            if siblings is node:
                parent.children = None
            else:
                assert isinstance(siblings, dict), "a node's parent does not know it"
                del siblings[node.key]
                if not siblings:
                    parent.children = None
            node.parent = None
            run = node.run
            if run is not None:
                run.nodes.pop()
                del run.data[-self.key_bytes :]
                node.run = None
            self.num_nodes -= 1
            node = parent

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first. For checks and reports: it is O(tree)."""
        pending = [self.root]
        while pending:
            children = pending.pop().children
            found = [] if children is None else [children] if isinstance(children, Node) else list(children.values())
            yield from found
            pending.extend(found)


def _pages_alike(run: Edge, data: bytes, step: int) -> int:
    """How many pages of ``run`` ``data`` begins with."""
    low, high = 0, min(len(run.nodes), len(data) // step)
    if run.data[: high * step] == data[: high * step]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if run.data[low * step : middle * step] == data[low * step : middle * step]:
            low = middle
        else:
            high = middle
    return low
