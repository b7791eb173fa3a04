"""Where pages are, which are locked, and which are evicted. No transfers, no policy about tiers.

A slot (one layer group of one page) is locked by leases and by transfers that have no lease. While its ``lock_ref``
is not 0, none of its copies can be evicted; when it becomes 0, they all enter their pools' eviction queues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay.engine.cache.pools.eviction import EvictionQueue, LruQueue, make_queue
from forebay.engine.cache.pools.page_pool import PagePool
from forebay.engine.cache.radix.native_radix import FEW_PAGES, native_radix
from forebay.engine.cache.radix.node import CachedPage, Node, Slot
from forebay.engine.cache.radix.tree import PageTree

__all__ = ["CachePools"]


class CachePools:
    """The tree, and per layer group a device pool and a host pool with their eviction queues.

    Args:
        page_size: tokens per page.
        device_pages: pages of each group's device pool.
        host_pages: pages of each group's host pool (0: there is no host tier).
        eviction: ``lru``, ``lfu`` or ``cost``.
        cost: seconds to recompute the page with a given page number (used by ``cost``).
    """

    def __init__(
        self,
        page_size: int,
        device_pages: Sequence[int],
        host_pages: Sequence[int],
        eviction: str,
        cost: Callable[[int], float],
    ) -> None:
        self.tree = PageTree(page_size, len(device_pages))
        self.device = [PagePool(n) for n in device_pages]
        self.host = [PagePool(n) for n in host_pages]
        self.device_queue: list[EvictionQueue] = [make_queue(eviction, cost) for _ in device_pages]
        self.host_queue: list[EvictionQueue] = [make_queue(eviction, cost) for _ in host_pages]
        # They handle the usual case: one layer group, lru, many pages.
        self._native = native_radix() if len(device_pages) == 1 and eviction == "lru" else None
        self.now = 0.0
        """The current time, set by the cache before each operation: copies are marked with it when they are used."""

    def inc_lock_ref(self, group: int, nodes: Sequence[Node]) -> None:
        """Lock these slots once more: none of their copies can be evicted."""
        if self._native is not None and len(nodes) > FEW_PAGES:
            self._inc_natively(nodes)
            return
        slots: Sequence[Slot] = [node.extra[group - 1] for node in nodes] if group else nodes
        idle = [slot for slot in slots if not slot.lock_ref]
        for slot in slots:
            slot.lock_ref += 1
        if not idle:
            return
        queued = [copy for slot in idle if (copy := slot.device) is not None and copy.prev is not None]
        if queued:
            self.device_queue[group].remove_all(queued)
        if self.host[group].size:
            queued = [copy for slot in idle if (copy := slot.host) is not None and copy.prev is not None]
            if queued:
                self.host_queue[group].remove_all(queued)

    def dec_lock_ref(self, group: int, nodes: Sequence[Node]) -> None:
        """Undo one ``inc_lock_ref``. ``nodes`` go from the root down; the deepest becomes evictable first."""
        if self._native is not None and len(nodes) > FEW_PAGES:
            self._dec_natively(nodes)
            return
        slots: Sequence[Slot] = [node.extra[group - 1] for node in nodes] if group else nodes
        for slot in slots:
            slot.lock_ref -= 1
        idle = [slot for slot in reversed(slots) if not slot.lock_ref]
        if not idle:
            return
        now = self.now
        copies = [copy for slot in idle if (copy := slot.device) is not None and copy.arriving is None]
        for copy in copies:
            copy.since = now
        self.device_queue[group].add_all(copies)
        has_all = len(copies) == len(idle)
        if self.host[group].size:
            copies = [copy for slot in idle if (copy := slot.host) is not None and copy.arriving is None]
            for copy in copies:
                copy.since = now
            self.host_queue[group].add_all(copies)
        if not has_all:
            self._prune_bare(group, nodes)

    def _prune_bare(self, group: int, nodes: Sequence[Node]) -> None:
        for node in reversed(nodes):
            slot = node.slot(group)
            if slot.device is None and slot.host is None:
                self.tree.prune(node)

    def _inc_natively(self, nodes: Sequence[Node]) -> None:
        assert self._native is not None, "the native functions are not built"
        device, host = self._native.inc_lock_ref(_listed(nodes), self.host[0].size > 0)
        self._lru(self.device_queue).counted(-device)
        self._lru(self.host_queue).counted(-host)

    def _dec_natively(self, nodes: Sequence[Node]) -> None:
        assert self._native is not None, "the native functions are not built"
        on_device, on_host = self._lru(self.device_queue), self._lru(self.host_queue)
        sentinel = on_host.sentinel if self.host[0].size else None
        device, host, is_bare = self._native.dec_lock_ref(_listed(nodes), self.now, on_device.sentinel, sentinel)
        on_device.counted(device)
        on_host.counted(host)
        if is_bare:
            self._prune_bare(0, nodes)

    @staticmethod
    def _lru(queues: list[EvictionQueue]) -> LruQueue:
        (queue,) = queues
        assert isinstance(queue, LruQueue), "the native functions handle lru queues only"
        return queue

    def insert_edge(self, parent: Node, keys: Sequence[bytes], pages: Sequence[int]) -> list[Node]:
        """Insert a chain of pages under ``parent``, which has no children: locked once, on the device.

        One layer group only.
        """
        edge = self.tree.edge_for(parent, keys)
        nodes: list[Node] = []
        for key, page in zip(keys, pages):
            node = Node(parent, key)
            node.lock_ref = node.hits = 1
            node.device = CachedPage(node, page)
            node.edge = edge
            parent.children = node
            nodes.append(node)
            parent = node
        edge.nodes += nodes
        return nodes

    def evict(self, group: int, count: int) -> int:
        """Evict in queue order until ``count`` pages are free, or a copy is being read; returns the number evicted."""
        pool, queue = self.device[group], self.device_queue[group]
        evicted = 0
        while pool.num_free < count:
            copy = queue.first()
            if copy is None or copy.readers:
                break
            queue.remove(copy)
            node = copy.node
            slot = node.extra[group - 1] if group else node
            slot.device = None
            pool.free(copy.page)
            if slot.host is None:
                self.tree.prune(node)
            evicted += 1
        return evicted

    def place_on_device(self, group: int, node: Node, page: int) -> CachedPage:
        """``page`` becomes the device copy of a locked slot that has none."""
        slot = node.slot(group)
        assert slot.lock_ref, "a device copy was placed in an unlocked slot"
        assert slot.device is None, "a slot got a second device copy"
        slot.device = copy = CachedPage(node, page)
        return copy

    def place_on_host(self, group: int, node: Node, page: int) -> CachedPage:
        """``page`` becomes the host copy of a slot that has none; the caller marks it as arriving."""
        slot = node.slot(group)
        assert slot.host is None, "a slot got a second host copy"
        slot.host = copy = CachedPage(node, page)
        return copy

    def drop_device(self, group: int, copy: CachedPage) -> None:
        """Drop a device copy and free its page."""
        slot = copy.node.slot(group)
        if copy.prev is not None:
            self.device_queue[group].remove(copy)
        slot.device = None
        self.device[group].free(copy.page)
        if slot.host is None and not slot.lock_ref:
            self.tree.prune(copy.node)

    def drop_host(self, group: int, copy: CachedPage) -> None:
        """Drop a host copy and free its page."""
        assert not copy.readers, "a host page was freed while a transfer reads it"
        slot = copy.node.slot(group)
        if copy.prev is not None:
            self.host_queue[group].remove(copy)
        slot.host = None
        self.host[group].free(copy.page)
        if slot.device is None and not slot.lock_ref:
            self.tree.prune(copy.node)

    def device_room(self, group: int) -> int:
        """Pages of ``group`` that can be allocated now: free, or evictable."""
        return self.device[group].num_free + len(self.device_queue[group])


def _listed(nodes: Sequence[Node]) -> list[Node]:
    return nodes if isinstance(nodes, list) else list(nodes)
