"""How a matched prefix becomes a lease: lock its pages, make room for what must be loaded, start the loads."""

from __future__ import annotations

from collections.abc import Callable

from forebay.engine.cache.interface import CachedTokens, Tier
from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.offload.load_back_manager import LoadBackManager
from forebay.engine.cache.offload.offload_manager import OffloadManager
from forebay.engine.cache.prefix_match import DEVICE, DISK, HOST, Match
from forebay.engine.cache.radix.native_radix import native_radix
from forebay.engine.cache.radix.node import Node
from forebay.engine.cache.tiers import Tiers

__all__ = ["LeaseAllocator"]


class LeaseAllocator:
    """Makes leases.

    Args:
        tiers: where pages are.
        offload: backs up what the lease uses, by policy.
        load_back: starts loads.
        make_room: frees so many device pages of each group; False: not now.
    """

    def __init__(
        self,
        tiers: Tiers,
        offload: OffloadManager,
        load_back: LoadBackManager,
        make_room: Callable[[list[int]], bool],
    ) -> None:
        self._page = tiers.spec.page_size
        self._pools = tiers.pools
        self._tree = tiers.pools.tree
        self._offload = offload
        self._load_back = load_back
        self._make_room = make_room
        self._groups = range(len(tiers.spec.groups))
        self._native = native_radix() if len(self._groups) == 1 else None

    def allocate_with_prefix(self, match: Match, num_tokens: int) -> CacheLease | None:
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
            self._pools.inc_lock_ref(group, nodes[match.first[group] :])
        items = self._load_back.allocate_pages(match, nodes) if loads and self._make_room(needed) else None
        if loads and items is None:
            for group in self._groups:
                self._pools.dec_lock_ref(group, nodes[match.first[group] :])
            return None
        lease = CacheLease(len(self._groups), max(64, num_tokens // self._page + 16))
        lease.prompt_pages = max(0, num_tokens - 1) // self._page
        if items is not None:
            self._load_back.start_loads(lease, items)
        self._fill(lease, match, nodes)
        self._load_back.attach_layer_events(lease)
        for group in self._groups:
            self._offload.queue_backups(lease, group, nodes[match.first[group] :])
        return lease

    def _has_room_to_load(self, match: Match, needed: list[int]) -> bool:
        """Whether the device pages can be freed without evicting any of the prefix's own."""
        for group, places in enumerate(match.where):
            first = match.first[group]
            own = sum(
                place == DEVICE and not node.slot(group).lock_ref
                for place, node in zip(places[first : match.length], match.nodes[first:])
            )
            if needed[group] > self._pools.device_room(group) - own:
                return False
        return True

    def _fill(self, lease: CacheLease, match: Match, nodes: list[Node]) -> None:
        """Set the page tables, the loads to wait for and the token counts of a new lease."""
        lease.nodes = nodes
        lease.num_pages = match.length
        lease.first = list(match.first)
        tiers = [DEVICE] * match.length
        if self._native is not None and not self._load_back.loads and not match.first[0]:
            self._native.fill_table(nodes, lease.tables[0][: match.length])
            lease.tiers, lease.cached = tiers, CachedTokens(match.length * self._page, 0, 0)
            return
        for node in nodes:
            node.hits += 1
        for group in self._groups:
            first = match.first[group]
            held = nodes[first:] if first else nodes
            copies = [node.extra[group - 1].device if group else node.device for node in held]
            lease.tables[group][first : match.length] = [copy.page for copy in copies]  # type: ignore[union-attr]
            if not self._load_back.loads:
                continue
            for index, copy in enumerate(copies, first):
                assert copy is not None, "a page of the prefix is not on the device"
                place = match.where[group][index]
                if copy.arriving is not None:
                    self._load_back.add_waiter(lease, copy.arriving)
                    place = HOST if copy.arriving.tier is Tier.HOST else DISK
                tiers[index] = max(tiers[index], place)
        lease.tiers = tiers
        lease.cached = self.count(tiers)

    def count(self, tiers: list[int]) -> CachedTokens:
        """Tokens by tier, of pages that came from these tiers."""
        page = self._page
        return CachedTokens(tiers.count(DEVICE) * page, tiers.count(HOST) * page, tiers.count(DISK) * page)
