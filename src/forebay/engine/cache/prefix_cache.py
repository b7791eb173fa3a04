"""The cache as the scheduler sees it: leases over a tree of pages (see ``interface.py`` for the contract)."""

from __future__ import annotations

from typing import Any

from forebay.engine.cache.config import CacheConfig
from forebay.engine.cache.interface import CachedTokens, Int32Array, Tier
from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.node import Node
from forebay.engine.cache.residency import Residency
from forebay.engine.cache.tree import token_bytes
from forebay.planning.kv_spec import KVSpec

__all__ = ["PrefixCache"]


class PrefixCache:
    """Rank 0's cache. Not thread-safe: one thread calls it.

    Args:
        spec: what a page is.
        config: sizes and policies.
    """

    def __init__(self, spec: KVSpec, config: CacheConfig) -> None:
        self.spec = spec
        self.config = config.validate(spec)
        self._page = spec.page_size
        self._windows = [group.window for group in spec.groups]
        self._groups = range(len(spec.groups))
        self._residency = Residency(
            spec.page_size, config.device_pages, (0,) * len(spec.groups), config.eviction, lambda depth: 1.0 + depth
        )
        self._tree = self._residency.tree
        self._leases: set[CacheLease] = set()
        self._counts = {"computed": 0, "device": 0, "evicted": 0}

    # -- leases ---------------------------------------------------------------------------------------------------

    def open(self, tokens: Int32Array) -> CacheLease | None:
        """Find, lock and (by policy) start loading the longest usable prefix of ``tokens``, at most len(tokens) - 1."""
        path = self._tree.walk(token_bytes(tokens), max(0, len(tokens) - 1) // self._page)
        usable = self._usable(path)
        nodes = path[:usable]
        lease = CacheLease(len(self._windows), max(64, len(tokens) // self._page + 16))
        lease.nodes = nodes
        lease.num_pages = usable
        for group in self._groups:
            first = lease.first[group] = self._first_readable(group, usable)
            held = nodes[first:] if first else nodes
            self._residency.hold(group, held)
            lease.tables[group][first:usable] = [n.slot(group).device.page for n in held]  # type: ignore[union-attr]
        for node in nodes:
            node.hits += 1
        lease.cached = CachedTokens(device=usable * self._page)
        self._leases.add(lease)
        self._counts["device"] += lease.cached.device
        return lease

    def extend(self, lease: CacheLease, num_tokens: int) -> bool:
        """Make room for positions 0 .. num_tokens - 1, evicting if needed. All or nothing; False: no pages now."""
        more = -(-num_tokens // self._page) - lease.num_pages
        if more <= 0:
            return True
        if any(self._residency.device_room(group) < more for group in self._groups):
            return False
        lease.reserve(lease.num_pages + more)
        for group in self._groups:
            self._make_room(group, more)
            pages = self._residency.device[group].take(more)
            lease.tables[group][lease.num_pages : lease.num_pages + more] = pages
        lease.num_pages += more
        return True

    def commit(self, lease: CacheLease, tokens: Int32Array) -> None:
        """The KV of ``tokens`` (the whole sequence so far) has been computed: full pages join the tree."""
        start, stop = len(lease.nodes), len(tokens) // self._page
        if stop > start:
            data = token_bytes(tokens[start * self._page : stop * self._page])
            parent = lease.nodes[-1] if start else self._tree.root
            step = self._tree.key_bytes
            for index in range(start, stop):
                offset = (index - start) * step
                parent = self._join(lease, index, parent, data[offset : offset + step])
            self._counts["computed"] += (stop - start) * self._page
        self._leave_window(lease, len(tokens))

    def fail_load(self, lease: CacheLease) -> int:
        """The lease's gate failed: drop what did not arrive; returns how many tokens are still good."""
        return len(lease.nodes) * self._page

    def close(self, lease: CacheLease) -> None:
        """Unlock everything, free the partial page."""
        assert not lease.closed, "a lease was closed twice"
        lease.closed = True
        for group in self._groups:
            for page in lease.own_pages(group):
                self._residency.device[group].give(page)
            self._residency.release(group, lease.nodes[lease.first[group] :])
        lease.num_pages = len(lease.nodes)
        self._leases.discard(lease)

    def poll(self) -> None:
        """Take note of finished transfers, start what waits for room. Never blocks."""

    def flush(self, tier: Tier | None = None) -> dict[str, int]:
        """Drop all unlocked copies in ``tier`` (None: everywhere); returns pages dropped a tier."""
        dropped = 0
        if tier in (None, Tier.DEVICE):
            for group in self._groups:
                while (copy := self._residency.device_queue[group].first()) is not None:
                    self._residency.drop_device(group, copy)
                    dropped += 1
        return {Tier.DEVICE.value: dropped}

    def stats(self) -> dict[str, Any]:
        """Counters and gauges."""
        return {"nodes": self._tree.num_nodes, "leases": len(self._leases), **self._counts}

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        for group in self._groups:
            owners: dict[int, str] = {}
            locks = 0
            for node in self._tree.nodes():
                slot = node.slot(group)
                locks += slot.lock
                if slot.device is not None:
                    assert slot.device.page not in owners, "two nodes own one device page"
                    owners[slot.device.page] = f"the page at depth {node.depth}"
            for lease in self._leases:
                for page in lease.own_pages(group):
                    assert page not in owners, "a lease's own page belongs to somebody else too"
                    owners[page] = "a lease"
                locks -= len(lease.nodes) - lease.first[group]
            assert locks == 0, "locks do not balance"
            self._residency.device[group].check(owners)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _first_readable(self, group: int, num_pages: int) -> int:
        """The first page of ``group`` that the token after ``num_pages`` full pages can read."""
        window = self._windows[group]
        if window is None:
            return 0
        return max(0, num_pages * self._page - window + 1) // self._page

    def _usable(self, path: list[Node]) -> int:
        """How many pages of ``path`` a sequence can start from."""
        usable = len(path)
        for group in self._groups:
            if self._windows[group] is None:
                present = 0
                for node in path[:usable]:
                    if node.slot(group).device is None:
                        break
                    present += 1
                usable = present
        if any(self._windows):
            runs = [self._runs(group, path[:usable]) for group in self._groups if self._windows[group] is not None]
            groups = [group for group in self._groups if self._windows[group] is not None]
            while usable and any(
                run[usable - 1] < usable - self._first_readable(group, usable) for group, run in zip(groups, runs)
            ):
                usable -= 1
        return usable

    @staticmethod
    def _runs(group: int, path: list[Node]) -> list[int]:
        """For each page: how many pages up to it are present without a gap."""
        runs: list[int] = []
        run = 0
        for node in path:
            run = run + 1 if node.slot(group).device is not None else 0
            runs.append(run)
        return runs

    def _make_room(self, group: int, count: int) -> None:
        pool, queue = self._residency.device[group], self._residency.device_queue[group]
        while pool.free < count:
            copy = queue.first()
            assert copy is not None, "room was promised that is not there"
            self._residency.drop_device(group, copy)
            self._counts["evicted"] += 1

    def _join(self, lease: CacheLease, index: int, parent: Node, key: bytes) -> Node:
        """Page ``index`` of the lease becomes the tree's, or is replaced by the one that is there already."""
        node = self._tree.child(parent, key)
        if node is None:
            node = self._tree.add(parent, key)
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

    def _leave_window(self, lease: CacheLease, num_tokens: int) -> None:
        """Give back pages that no later token of this sequence can read."""
        for group in self._groups:
            window = self._windows[group]
            if window is None:
                continue
            first = lease.first[group]
            stop = min(len(lease.nodes), max(0, num_tokens - window + 1) // self._page)
            if stop > first:
                for index in range(first, stop):
                    page = lease.duplicates.pop((group, index), None)
                    if page is not None:
                        self._residency.device[group].give(page)
                lease.tables[group][first:stop] = -1
                lease.first[group] = stop
                self._residency.release(group, lease.nodes[first:stop])
