"""The cache's invariants, checked from scratch. O(tree), for tests and for checks of a live server."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise

from forebay.engine.cache.radix.node import CachedPage, Node, Slot
from forebay.engine.cache.state import CacheState

__all__ = ["check_cache"]


def check_cache(cache: CacheState) -> None:
    """Raise AssertionError when an invariant is broken."""
    nodes = list(cache.tree.nodes())
    _check_tree(cache, nodes)
    for group in range(len(cache.spec.groups)):
        _check_locks(cache, nodes, group)
        _check_device_owners(cache, nodes, group)
        _check_host_owners(cache, nodes, group)
        _check_queues(cache, nodes, group)
    if cache.tiers.store is not None:
        cache.tiers.store.check()


def _check_tree(cache: CacheState, nodes: list[Node]) -> None:
    assert len(nodes) == cache.tree.num_nodes, "the tree's count of nodes is wrong"
    for node in nodes:
        parent = node.parent
        assert parent is not None, "a node in the tree has no parent"
        assert cache.tree.child(parent, node.key) is node, "a node is missing from its parent's children"
        assert node.depth == parent.depth + 1, "a node's page number is wrong"
        assert node.children is not None or node.has_copies(), "a leaf without any copy was not pruned"
        edge = node.edge
        if edge is not None and edge.nodes[0] is node:
            assert edge.data == b"".join(n.key for n in edge.nodes), "an edge's data are not its pages' tokens"
            assert all(n.edge is edge for n in edge.nodes), "a node refers to another edge"
            assert all(a is b.parent for a, b in pairwise(edge.nodes)), "an edge is not a path"
        assert edge is None or edge.nodes[node.depth - edge.nodes[0].depth] is node, "a node is misplaced in its edge"
        assert (node.digest is None) == (cache.tiers.store is None), "addresses and the disk tier do not go together"


def _check_locks(cache: CacheState, nodes: list[Node], group: int) -> None:
    """A slot's ``lock_ref`` is the number of leases and transfers that lock it."""
    holders: Counter[Node] = Counter()
    for lease in cache.leases:
        holders.update(lease.nodes[lease.first[group] :])
    for held in chain.from_iterable(op.held for op in cache.offload.backups.values()):
        if held[0] == group:
            holders.update(held[1])
    for _, queued_group, queued in cache.offload.queued():
        if queued_group == group:
            holders.update(queued)
    for load in cache.load_back.loads.values():
        holders.update(item.node for item in load.items if item.group == group)
    for node in nodes:
        lock = node.slot(group).lock_ref
        assert lock == holders.pop(node, 0), "a page's lock_ref is not the number of its holders"
    assert not holders, "a page that is not in the tree is locked"


def _check_device_owners(cache: CacheState, nodes: list[Node], group: int) -> None:
    owners: dict[int, str] = {}

    def own(page: int, who: str) -> None:
        assert page not in owners, f"device page {page} belongs to {owners.get(page)} and to {who}"
        owners[page] = who

    for node in nodes:
        copy = node.slot(group).device
        if copy is not None:
            assert copy.node is node, "a copy refers to another node"
            own(copy.page, f"the tree at page {node.depth}")
    for lease in cache.leases:
        for page in [] if lease.closed else lease.own_pages(group):
            own(page, "a lease")
    cache.pools.device[group].check(owners)


def _check_host_owners(cache: CacheState, nodes: list[Node], group: int) -> None:
    owners: dict[int, str] = {}

    def own(page: int, who: str) -> None:
        assert page not in owners, f"host page {page} belongs to {owners.get(page)} and to {who}"
        owners[page] = who

    for node in nodes:
        copy = node.slot(group).host
        if copy is not None:
            assert copy.node is node, "a copy refers to another node"
            own(copy.page, f"the tree at page {node.depth}")
    for item in chain(cache.offload.staging_items(), cache.load_back.staging_items()):
        if item.group == group and (item.host.arriving is not None or item.node.slot(group).host is not item.host):
            own(item.host.page, "a transfer")
    cache.pools.host[group].check(owners)


def _check_queues(cache: CacheState, nodes: list[Node], group: int) -> None:
    """The queues hold exactly the evictable copies: unlocked, arrived, and not evicted already."""
    for name, queue in (("device", cache.pools.device_queue[group]), ("host", cache.pools.host_queue[group])):
        listed = list(queue)
        assert len(listed) == len(queue), f"the {name} queue's length is wrong"
        expected = set()
        for node in nodes:
            slot = node.slot(group)
            copy = slot.device if name == "device" else slot.host
            if copy is not None and _is_evictable(slot, copy):
                expected.add(copy)
        assert set(listed) == expected, f"the {name} queue does not hold what is evictable"


def _is_evictable(slot: Slot, copy: CachedPage) -> bool:
    if slot.lock_ref or copy.arriving is not None:
        assert copy.prev is None, "a page that is locked or arriving is in a queue"
        return False
    if copy.prev is None:
        assert copy.readers, "a page that is neither locked nor read is in no queue"
        return False
    return True
