"""How a matched prefix becomes a lease: pages held, room made, loads started."""

from __future__ import annotations

from collections.abc import Callable

from forebay.engine.cache.interface import CachedTokens, Tier
from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.offload.load_back_manager import LoadBackManager
from forebay.engine.cache.offload.offload_manager import OffloadManager
from forebay.engine.cache.pools.cache_pools import CachePools
from forebay.engine.cache.prefix_match import DEVICE, DISK, HOST, Match
from forebay.engine.cache.radix.native_radix import native_radix
from forebay.engine.cache.radix.node import Node

__all__ = ["LeaseAllocator"]


class LeaseAllocator:
    """Makes leases.

    Args:
        page_size: tokens a page.
        residency: where pages are.
        spill: told what the lease uses.
        recall: starts loads.
        make_room: frees so many device pages of each group; False: not now.
    """

    def __init__(
        self,
        page_size: int,
        residency: CachePools,
        spill: OffloadManager,
        recall: LoadBackManager,
        make_room: Callable[[list[int]], bool],
    ) -> None:
        self._page = page_size
        self._residency = residency
        self._tree = residency.tree
        self._spill = spill
        self._recall = recall
        self._make_room = make_room
        self._groups = range(len(residency.device))
        self._passes = native_radix() if len(residency.device) == 1 else None

    def lease(self, match: Match, num_tokens: int) -> CacheLease | None:
        """A lease over ``match``, its loads started; None: no room now."""
        parts = [places[first : match.length] for first, places in zip(match.first, match.where)]
        needed = [part.count(HOST) + part.count(DISK) for part in parts]
        loads = any(needed)
        if loads and not self._has_room_to_load(match, needed):
            return None
        nodes = match.nodes
        for key, digest in match.beyond:
            node = self._tree.add(nodes[-1] if nodes else self._tree.root, key)
            node.digest = digest
            nodes.append(node)
        for group in self._groups:
            self._residency.hold(group, nodes[match.first[group] :])
        items = self._recall.take_pages(match, nodes) if loads and self._make_room(needed) else None
        if loads and items is None:
            for group in self._groups:
                self._residency.release(group, nodes[match.first[group] :])
            return None
        lease = CacheLease(len(self._groups), max(64, num_tokens // self._page + 16))
        lease.prompt_pages = max(0, num_tokens - 1) // self._page
        if items is not None:
            self._recall.start(lease, items)
        self._fill(lease, match, nodes)
        self._recall.make_gate(lease)
        for group in self._groups:
            self._spill.used(lease, group, nodes[match.first[group] :])
        return lease

    def _has_room_to_load(self, match: Match, needed: list[int]) -> bool:
        """Whether the device pages can be had without taking any of the prefix's own."""
        for group, places in enumerate(match.where):
            first = match.first[group]
            own = sum(
                place == DEVICE and not node.slot(group).lock
                for place, node in zip(places[first : match.length], match.nodes[first:])
            )
            if needed[group] > self._residency.device_room(group) - own:
                return False
        return True

    def _fill(self, lease: CacheLease, match: Match, nodes: list[Node]) -> None:
        """Page tables, waits and counts of a fresh lease."""
        lease.nodes = nodes
        lease.num_pages = match.length
        lease.first = list(match.first)
        tiers = [DEVICE] * match.length
        if self._passes is not None and not self._recall.loads and not match.first[0]:
            self._passes.use(nodes, lease.tables[0][: match.length])
            lease.tiers, lease.cached = tiers, CachedTokens(match.length * self._page, 0, 0)
            return
        for node in nodes:
            node.hits += 1
        for group in self._groups:
            first = match.first[group]
            held = nodes[first:] if first else nodes
            copies = [node.extra[group - 1].device if group else node.device for node in held]
            lease.tables[group][first : match.length] = [copy.page for copy in copies]  # type: ignore[union-attr]
            if not self._recall.loads:
                continue
            for index, copy in enumerate(copies, first):
                assert copy is not None, "a page of the prefix is not on the device"
                place = match.where[group][index]
                if copy.arriving is not None:
                    self._recall.wait_for(lease, copy.arriving)
                    place = HOST if copy.arriving.tier is Tier.HOST else DISK
                tiers[index] = max(tiers[index], place)
        lease.tiers = tiers
        lease.cached = self.count(tiers)

    def count(self, tiers: list[int]) -> CachedTokens:
        """Tokens of pages that came from these tiers."""
        page = self._page
        return CachedTokens(tiers.count(DEVICE) * page, tiers.count(HOST) * page, tiers.count(DISK) * page)
