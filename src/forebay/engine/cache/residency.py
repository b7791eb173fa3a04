"""Which pages are where, who holds them, and what goes when room is needed. No transfers, no policy about tiers.

A slot (one layer group of one page) is *held* by leases and by transfers that have no lease. While it is held none of
its copies can go; the moment nobody holds it they all join their pools' eviction queues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay.engine.cache.eviction import EvictionQueue, make_queue
from forebay.engine.cache.node import Copy, Node
from forebay.engine.cache.pools import PagePool
from forebay.engine.cache.tree import PageTree

__all__ = ["Residency"]


class Residency:
    """The tree, and per layer group a device pool and a host pool with their eviction queues.

    Args:
        page_size: tokens a page.
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
        self.now = 0.0
        """The cache's clock, set by its owner: when copies were last used."""

    def hold(self, group: int, nodes: Sequence[Node]) -> None:
        """Keep every copy of these slots where it is."""
        from_device: list[Copy] = []
        from_host: list[Copy] = []
        for node in nodes:
            slot = node.extra[group - 1] if group else node
            if not slot.lock:
                copy = slot.device
                if copy is not None and copy.prev is not None:
                    from_device.append(copy)
                copy = slot.host
                if copy is not None and copy.prev is not None:
                    from_host.append(copy)
            slot.lock += 1
        if from_device:
            self.device_queue[group].remove_all(from_device)
        if from_host:
            self.host_queue[group].remove_all(from_host)

    def release(self, group: int, nodes: Sequence[Node]) -> None:
        """Undo one ``hold``. ``nodes`` run from the root down; the deepest becomes evictable first."""
        now = self.now
        to_device: list[Copy] = []
        to_host: list[Copy] = []
        for node in reversed(nodes):
            slot = node.extra[group - 1] if group else node
            slot.lock -= 1
            if slot.lock:
                continue
            device, host = slot.device, slot.host
            if device is not None and device.arriving is None:
                device.since = now
                to_device.append(device)
            if host is not None:
                if host.arriving is None:
                    host.since = now
                    to_host.append(host)
            elif device is None:
                self.tree.prune(node)
        if to_device:
            self.device_queue[group].add_all(to_device)
        if to_host:
            self.host_queue[group].add_all(to_host)

    def adopt(self, parent: Node, keys: Sequence[bytes], pages: Sequence[int]) -> list[Node]:
        """New pages in a row under ``parent``, which has no children: held once, on the device. One layer group only."""
        nodes: list[Node] = []
        for key, page in zip(keys, pages):
            node = Node(parent, key)
            node.lock = node.hits = 1
            node.device = Copy(node, page)
            parent.children = node
            nodes.append(node)
            parent = node
        self.tree.num_nodes += len(nodes)
        return nodes

    def evict(self, group: int, count: int) -> int:
        """Drop the first in line until ``count`` device pages are free, or one is being read; returns how many went."""
        pool, queue = self.device[group], self.device_queue[group]
        evicted = 0
        while pool.free < count:
            copy = queue.first()
            if copy is None or copy.readers:
                break
            queue.remove(copy)
            node = copy.node
            slot = node.extra[group - 1] if group else node
            slot.device = None
            pool.give(copy.page)
            if slot.host is None:
                self.tree.prune(node)
            evicted += 1
        return evicted

    def place_on_device(self, group: int, node: Node, page: int) -> Copy:
        """``page`` becomes the device copy of a held slot that has none."""
        slot = node.slot(group)
        assert slot.lock, "a device copy was placed in a slot that nobody holds"
        assert slot.device is None, "a slot got a second device copy"
        slot.device = copy = Copy(node, page)
        return copy

    def place_on_host(self, group: int, node: Node, page: int) -> Copy:
        """``page`` becomes the host copy of a slot that has none; the caller marks it as arriving."""
        slot = node.slot(group)
        assert slot.host is None, "a slot got a second host copy"
        slot.host = copy = Copy(node, page)
        return copy

    def drop_device(self, group: int, copy: Copy) -> None:
        """Forget a device copy and free its page."""
        slot = copy.node.slot(group)
        if copy.prev is not None:
            self.device_queue[group].remove(copy)
        slot.device = None
        self.device[group].give(copy.page)
        if slot.host is None and not slot.lock:
            self.tree.prune(copy.node)

    def drop_host(self, group: int, copy: Copy) -> None:
        """Forget a host copy and free its page."""
        assert not copy.readers, "a host page was freed while a transfer reads it"
        slot = copy.node.slot(group)
        if copy.prev is not None:
            self.host_queue[group].remove(copy)
        slot.host = None
        self.host[group].give(copy.page)
        if slot.device is None and not slot.lock:
            self.tree.prune(copy.node)

    def device_room(self, group: int) -> int:
        """Pages of ``group`` that can be had now: free, or evictable."""
        return self.device[group].free + len(self.device_queue[group])
