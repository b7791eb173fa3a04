"""How computed pages are inserted into the tree, and released from a lease when its window has passed them."""

from __future__ import annotations

from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.prefix.match import PrefixMatcher
from forebay.engine.cache.radix.node import Node
from forebay.engine.cache.radix.page_hash import chain_digest
from forebay.engine.cache.tiers import Tiers

__all__ = ["PrefixInserter"]


class PrefixInserter:
    """Moves a lease's own pages into the tree.

    Args:
        tiers: where pages are. With a disk tier in them every page gets a content address.
        matcher: computes which pages a window can still read.
    """

    def __init__(self, tiers: Tiers, matcher: PrefixMatcher) -> None:
        spec = tiers.spec
        self._page = spec.page_size
        self._groups = range(len(spec.groups))
        self._windowed = [g for g, group in enumerate(spec.groups) if group.window is not None]
        self._pools = tiers.pools
        self._tree = tiers.pools.tree
        self._matcher = matcher
        self._can_insert_edges = len(spec.groups) == 1 and tiers.store is None

    def insert_prefix(self, lease: CacheLease, keys: list[bytes]) -> None:
        """Insert the lease's next pages, whose token bytes are ``keys``, into the tree."""
        start = len(lease.nodes)
        parent = lease.nodes[-1] if start else self._tree.root
        for index, key in enumerate(keys, start):
            if parent.children is None and self._can_insert_edges:
                # The parent has no children, so all pages that follow are new.
                pages = lease.tables[0][index : start + len(keys)].tolist()
                lease.nodes += self._pools.insert_edge(parent, keys[index - start :], pages)
                return
            parent = self._insert_page(lease, index, parent, key)

    def _insert_page(self, lease: CacheLease, index: int, parent: Node, key: bytes) -> Node:
        """Insert page ``index`` of the lease, or replace it by the same page where the tree has it already."""
        node = self._tree.child(parent, key)
        if node is None:
            node = self._tree.add(parent, key)
            if parent.digest is not None:
                node.digest = chain_digest(parent.digest, key)
        node.hits += 1
        for group in self._groups:
            self._pools.inc_lock_ref(group, (node,))
            table = lease.tables[group]
            page = int(table[index])
            copy = node.slot(group).device
            if copy is None:
                self._pools.place_on_device(group, node, page)
            elif copy.arriving is None:
                table[index] = copy.page
                self._pools.device[group].free(page)
            else:
                lease.duplicates[group, index] = page
        lease.nodes.append(node)
        return node

    def release_out_of_window(self, lease: CacheLease) -> None:
        """Release pages that no token after the last full page can read.

        It is the last full page and not the last token, because the next turn of a conversation starts from there.
        """
        for group in self._windowed:
            first = lease.first[group]
            stop = min(len(lease.nodes), self._matcher.first_readable(group, len(lease.nodes) * self._page))
            if stop <= first:
                continue
            for index in range(first, stop) if lease.duplicates else ():
                page = lease.duplicates.pop((group, index), None)
                if page is not None:
                    self._pools.device[group].free(page)
            lease.tables[group][first:stop] = -1
            lease.first[group] = stop
            self._pools.dec_lock_ref(group, lease.nodes[first:stop])
