"""How computed pages join the tree, and leave a lease again when its window has passed them."""

from __future__ import annotations

from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.pools.cache_pools import CachePools
from forebay.engine.cache.prefix.match import PrefixMatcher
from forebay.engine.cache.radix.node import Node
from forebay.engine.cache.radix.page_hash import chain_digest
from forebay.kv.spec import KVSpec

__all__ = ["PrefixInserter"]


class PrefixInserter:
    """Turns a lease's own pages into the tree's.

    Args:
        spec: what a page is.
        residency: where pages are.
        matcher: knows what a window can still read.
        has_disk: pages need addresses.
    """

    def __init__(self, spec: KVSpec, residency: CachePools, matcher: PrefixMatcher, *, has_disk: bool) -> None:
        self._page = spec.page_size
        self._groups = range(len(spec.groups))
        self._windowed = [g for g, group in enumerate(spec.groups) if group.window is not None]
        self._residency = residency
        self._tree = residency.tree
        self._matcher = matcher
        self._in_a_row = len(spec.groups) == 1 and not has_disk

    def join(self, lease: CacheLease, keys: list[bytes]) -> None:
        """The lease's next pages, whose token bytes are ``keys``, join the tree."""
        start = len(lease.nodes)
        parent = lease.nodes[-1] if start else self._tree.root
        for index, key in enumerate(keys, start):
            if parent.children is None and self._in_a_row:
                # Nothing hangs here yet, so all that follow are new.
                pages = lease.tables[0][index : start + len(keys)].tolist()
                lease.nodes += self._residency.adopt(parent, keys[index - start :], pages)
                return
            parent = self._join_one(lease, index, parent, key)

    def _join_one(self, lease: CacheLease, index: int, parent: Node, key: bytes) -> Node:
        """Page ``index`` of the lease becomes the tree's, or is replaced by the one that is there already."""
        node = self._tree.child(parent, key)
        if node is None:
            node = self._tree.add(parent, key)
            if parent.digest is not None:
                node.digest = chain_digest(parent.digest, key)
        node.hits += 1
        for group in self._groups:
            self._residency.hold(group, (node,))
            table = lease.tables[group]
            page = int(table[index])
            copy = node.slot(group).device
            if copy is None:
                self._residency.place_on_device(group, node, page)
            elif copy.arriving is None:
                table[index] = copy.page
                self._residency.device[group].give(page)
            else:
                lease.duplicates[group, index] = page
        lease.nodes.append(node)
        return node

    def leave_windows(self, lease: CacheLease) -> None:
        """Give back pages that no token after the last full page can read.

        The last full page and not the last token: that is where the next turn of a conversation takes it up.
        """
        for group in self._windowed:
            first = lease.first[group]
            stop = min(len(lease.nodes), self._matcher.first_readable(group, len(lease.nodes) * self._page))
            if stop <= first:
                continue
            for index in range(first, stop) if lease.duplicates else ():
                page = lease.duplicates.pop((group, index), None)
                if page is not None:
                    self._residency.device[group].give(page)
            lease.tables[group][first:stop] = -1
            lease.first[group] = stop
            self._residency.release(group, lease.nodes[first:stop])
