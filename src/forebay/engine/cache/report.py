"""The cache's report: counters for /metrics, and the picture for GET /cache. It has counts, never a token."""

from __future__ import annotations

import heapq
import itertools
from typing import Any

from forebay.engine.cache.pools.eviction import EvictionQueue
from forebay.engine.cache.pools.page_pool import PagePool
from forebay.engine.cache.radix.node import Node
from forebay.engine.cache.state import CacheState

__all__ = ["snapshot", "stats"]

_LOOK_AT = 20_000
"""The most nodes that the search for the hottest prefixes visits, so that a large tree does not stop a server."""


def stats(cache: CacheState) -> dict[str, Any]:
    """Counters and gauges; O(groups)."""
    groups = [_group_stats(cache, group) for group in range(len(cache.spec.groups))]
    return {
        **cache.tiers.accounting.as_dict(),
        "nodes": cache.tree.num_nodes,
        "leases": sum(not lease.closed for lease in cache.leases),
        "leases_closing": sum(lease.closed for lease in cache.leases),
        "transfers": {
            "backups": len(cache.offload.backups),
            "backup_pages": cache.offload.backing_up_pages,
            "disk_writes": len(cache.offload.disk_writes.writes),
            "loads": len(cache.load_back.loads),
        },
        "tiers": groups[0],
        "groups": [{"group": group.name, **tiers} for group, tiers in zip(cache.spec.groups, groups)],
        "rates": {
            "prefill_tokens_per_s": cache.tiers.rates.prefill.value,
            "host_bytes_per_s": cache.tiers.rates.host.value,
            "disk_bytes_per_s": cache.tiers.rates.disk.value,
        },
        "disk": None if cache.tiers.store is None else cache.tiers.store.state(),
    }


def _group_stats(cache: CacheState, group: int) -> dict[str, Any]:
    pools = cache.pools
    tiers = {"device": _pool_stats(cache, pools.device[group], pools.device_queue[group])}
    if not cache.offload.is_staging:
        tiers["host"] = _pool_stats(cache, pools.host[group], pools.host_queue[group])
    if cache.tiers.store is not None:
        page_bytes = cache.tiers.store.shapes[group].record_bytes
        pages = cache.tiers.store.num_pages(group)
        tokens = pages * cache.spec.page_size
        capacity = cache.tiers.config.settings.disk_bytes // page_bytes * cache.spec.page_size
        tiers["disk"] = {"tokens": {"stored": tokens}, "capacity_tokens": capacity}
    return tiers


def _pool_stats(cache: CacheState, pool: PagePool, queue: EvictionQueue) -> dict[str, Any]:
    """Tokens by state: ``free``, ``evictable``, ``held`` (locked); and the age of the copy that is evicted next."""
    page_size = cache.spec.page_size
    first = queue.first()
    return {
        "tokens": {
            "free": pool.num_free * page_size,
            "evictable": len(queue) * page_size,
            "held": (pool.num_used - len(queue)) * page_size,
        },
        "capacity_tokens": pool.size * page_size,
        "oldest_s": None if first is None else cache.pools.now - first.since,
    }


def snapshot(cache: CacheState, prefixes: int) -> dict[str, Any]:
    """The tree's size, the hottest prefixes, the policies, and everything in ``stats``."""
    picture = {
        "page_size": cache.spec.page_size,
        "tree": {"pages": cache.tree.num_nodes, "tokens": cache.tree.num_nodes * cache.spec.page_size},
        "hottest_prefixes": _hottest(cache, prefixes),
        "policies": {
            "write": cache.tiers.config.settings.write_policy.value,
            "eviction": cache.tiers.config.settings.eviction.value,
            "load": cache.tiers.config.settings.load.value,
        },
    }
    numbers = stats(cache)
    assert not picture.keys() & numbers.keys(), "a counter has the name of a part of the picture"
    return picture | numbers


def _hottest(cache: CacheState, count: int) -> list[dict[str, Any]]:
    """The most used prefixes. A prefix ends where the number of uses falls along a path.

    A child is never used more often than its parent, so the search always goes on at the most used page seen so far.
    """
    order = itertools.count()
    heap: list[tuple[int, int, Node]] = [(0, next(order), cache.tree.root)]
    found: list[dict[str, Any]] = []
    for _ in range(_LOOK_AT):
        if not heap or len(found) >= count:
            break
        _, _, node = heapq.heappop(heap)
        children = node.children
        below = [] if children is None else [children] if isinstance(children, Node) else list(children.values())
        for child in below if len(below) <= count else heapq.nlargest(count, below, key=lambda n: n.hits):
            heapq.heappush(heap, (-child.hits, next(order), child))
        if node.parent is not None and not any(child.hits == node.hits for child in below):
            found.append(_describe(cache, node))
    return found


def _describe(cache: CacheState, node: Node) -> dict[str, Any]:
    """One prefix: its length, its uses, and how many of its tokens are in which tier (by its first layer group)."""
    page_size = cache.spec.page_size
    device = host = 0
    at: Node | None = node
    while at is not None and at.parent is not None:
        device += at.device is not None
        host += at.host is not None
        at = at.parent
    return {
        "tokens": (node.depth + 1) * page_size,
        "uses": node.hits,
        "device_tokens": device * page_size,
        "host_tokens": host * page_size,
    }
