"""Host -> device and disk -> host -> device: loads the pages that a request wants from the lower tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from forebay.engine.cache.actions import DiskPage, DiskRead, Done, LoadBack
from forebay.engine.cache.interface import Tier
from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.offload.offload_manager import OffloadManager, page_mappings
from forebay.engine.cache.offload.operations import LoadOp, PageTransfer
from forebay.engine.cache.prefix_match import DISK, HOST, Match
from forebay.engine.cache.radix.node import CachedPage, Node
from forebay.engine.cache.tiers import Tiers

__all__ = ["LoadBackManager"]


class LoadBackManager:
    """Loads under way.

    Args:
        tiers: without an executor in them there is nothing to load from.
        offload: frees host pages for what comes from disk.
        on_lease_idle: called when no transfer of a lease is under way any more.
        on_loaded: called when all loads of a lease have arrived.
    """

    def __init__(
        self,
        tiers: Tiers,
        offload: OffloadManager,
        on_lease_idle: Callable[[CacheLease], None],
        on_loaded: Callable[[CacheLease], None],
    ) -> None:
        self._tiers = tiers
        self._pools = tiers.pools
        self._accounting = tiers.accounting
        self._offload = offload
        self._on_lease_idle = on_lease_idle
        self._on_loaded = on_loaded
        self._page_bytes = [tiers.spec.page_bytes(group) for group in range(len(tiers.spec.groups))]
        self.loads: dict[int, LoadOp] = {}
        self._by_prefetch: dict[int, LoadOp] = {}

    @property
    def is_busy(self) -> bool:
        """True while a load or disk read is under way."""
        return bool(self.loads)

    def staging_items(self) -> Iterable[PageTransfer]:
        """Items whose host page belongs to a load and not to the tree (for checks)."""
        if self._offload.is_staging:
            for op in self.loads.values():
                yield from op.items

    # -- starting -------------------------------------------------------------------------------------------------

    def allocate_pages(self, match: Match, nodes: list[Node]) -> dict[int, list[PageTransfer]] | None:
        """Allocate device pages for all that must be loaded, and host pages for what comes from disk.

        The caller has locked the nodes and made room on the device. Returns items by HOST and DISK, each in the order
        of the sequence, or None when there are no host pages now; then nothing was allocated.
        """
        wanted: list[tuple[int, int, int]] = []
        for group, places in enumerate(match.where):
            first = match.first[group]
            wanted += [(group, i, places[i]) for i in range(first, match.length) if places[i] >= HOST]
        host_pages: list[tuple[int, int]] = []
        for group, _, place in wanted:
            if place == DISK:
                page = self._offload.allocate_host_page(group)
                if page is None:
                    for other_group, allocated in host_pages:
                        self._pools.host[other_group].free(allocated)
                    return None
                host_pages.append((group, page))
        fresh = iter(host_pages)
        items: dict[int, list[PageTransfer]] = {HOST: [], DISK: []}
        for group, index, place in wanted:
            node = nodes[index]
            device = self._pools.place_on_device(group, node, self._pools.device[group].allocate(1)[0])
            host = node.slot(group).host
            if place == DISK:
                page = next(fresh)[1]
                host = (
                    CachedPage(node, page) if self._offload.is_staging else self._pools.place_on_host(group, node, page)
                )
            assert host is not None, "a host copy vanished while its slot was held"
            items[place].append(PageTransfer(group, node, device, host))
        return items

    def start_loads(self, lease: CacheLease, items: dict[int, list[PageTransfer]]) -> None:
        """Start the loads of ``items``; ``lease`` waits for them."""
        for place, tier in ((HOST, Tier.HOST), (DISK, Tier.DISK)):
            if items[place]:
                op = self._start_one(lease, tier, items[place])
                lease.transfers += 1
                self.add_waiter(lease, op)

    def _start_one(self, lease: CacheLease, tier: Tier, items: list[PageTransfer]) -> LoadOp:
        executor = self._tiers.running_executor
        op = LoadOp(next(self._tiers.ids), tier, items, lease)
        self.loads[op.id] = op
        for item in items:
            self._pools.inc_lock_ref(item.group, (item.node,))
            assert item.device is not None, "a load without a device copy"
            item.device.arriving = op
            if tier is Tier.DISK:
                item.host.arriving = op
        if tier is Tier.DISK:
            status_slot = executor.acquire_status_slot()
            assert status_slot is not None, "the caller has seen that a status slot is free"
            op.status_slot, op.prefetch_id = status_slot, next(self._tiers.ids)
            self._by_prefetch[op.prefetch_id] = op
            pages = [DiskPage(i.group, i.node.digest or b"", i.node.key, i.host.page) for i in items]
            executor.submit(DiskRead(op.prefetch_id, tuple(pages), status_slot))
        executor.submit(LoadBack(op.id, page_mappings(items), op.status_slot))
        return op

    @staticmethod
    def add_waiter(lease: CacheLease, op: LoadOp) -> None:
        """``lease`` uses pages of ``op``."""
        if op not in lease.waits_for:
            lease.waits_for = (*lease.waits_for, op)
            op.waiting.append(lease)

    def attach_layer_events(self, lease: CacheLease) -> None:
        """Give ``lease`` the layer events of everything it waits for."""
        if not lease.waits_for:
            return
        host = sum(self._op_bytes(op) for op in lease.waits_for)
        disk = sum(self._op_bytes(op) for op in lease.waits_for if op.tier is Tier.DISK)
        estimate = self._tiers.rates.load_seconds(host - disk, disk)
        timeout_s = max(self._tiers.config.load_timeout_s, 4 * estimate)
        lease.layer_events = self._tiers.running_executor.layer_events(
            tuple(op.id for op in lease.waits_for), timeout_s
        )

    def _op_bytes(self, op: LoadOp) -> int:
        return sum(self._page_bytes[item.group] for item in op.items)

    # -- ending ---------------------------------------------------------------------------------------------------

    def load_done(self, done: Done) -> None:
        """A LoadBack has ended on every rank."""
        op = self.loads[done.id]
        op.load_ok = done.ok
        if done.ok:
            way = "host_device" if op.tier is Tier.HOST else "disk_device"
            self._accounting.moved(way, len(op.items), done.nbytes, done.seconds)
            if op.tier is Tier.HOST:
                self._tiers.rates.host.note(self._op_bytes(op), done.seconds)
        else:
            self._accounting.loads_failed += 1
            self._accounting.drops[done.reason or "load_failed"] += len(op.items)
        if op.is_complete:
            self._end(op)

    def prefetch_done(self, done: Done) -> None:
        """A DiskRead has ended."""
        op = self._by_prefetch.pop(done.id)
        op.prefetch_id = -1
        op.bad = {i for i, _ in done.bad}
        self._accounting.moved("disk_host", len(op.items) - len(op.bad), done.nbytes, done.seconds)
        self._accounting.dropped(why for _, why in done.bad)
        self._tiers.rates.disk.note(done.nbytes, done.seconds)
        if op.is_complete:
            self._end(op)

    def _end(self, op: LoadOp) -> None:
        """Both the load and its disk read have ended: keep good copies, drop bad ones, and let leases go on."""
        del self.loads[op.id]
        if op.status_slot >= 0:
            self._tiers.running_executor.release_status_slot(op.status_slot)
        for i, item in enumerate(op.items):
            assert item.device is not None, "a load without a device copy"
            item.device.arriving = None
            if not op.load_ok:
                self._pools.drop_device(item.group, item.device)
            if op.tier is Tier.DISK:
                self._end_host(item, i in op.bad)
        for group in {item.group for item in op.items}:
            self._pools.dec_lock_ref(group, [item.node for item in op.items if item.group == group])
        for lease in op.waiting:
            if op.load_ok:
                lease.waits_for = tuple(other for other in lease.waits_for if other is not op)
                if not lease.waits_for:
                    self._on_loaded(lease)
        owner, op.owner = op.owner, None
        if owner is not None:
            owner.transfers -= 1
            if not owner.transfers:
                self._on_lease_idle(owner)

    def _end_host(self, item: PageTransfer, bad: bool) -> None:
        item.host.arriving = None
        if self._offload.is_staging:
            self._pools.host[item.group].free(item.host.page)
        elif bad:
            self._pools.drop_host(item.group, item.host)

    def detach(self, lease: CacheLease) -> None:
        """``lease`` does not wait for its loads any more; they run to their end."""
        for op in lease.waits_for:
            op.waiting.remove(lease)
            if op.owner is lease:
                op.owner = None
                lease.transfers -= 1
        lease.waits_for = ()
        lease.layer_events = None
