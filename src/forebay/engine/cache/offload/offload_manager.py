"""Device -> host -> disk: which pages are backed up, and which are evicted when room is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from forebay.engine.cache.actions import Backup, Done, PageMapping
from forebay.engine.cache.config import WritePolicy
from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.offload.disk_write_queue import DiskWriteQueue
from forebay.engine.cache.offload.operations import BackupOp, PageTransfer
from forebay.engine.cache.radix.node import CachedPage, Node
from forebay.engine.cache.tiers import Tiers

__all__ = ["OffloadManager", "page_mappings"]


class OffloadManager:
    """Backups, disk writes and eviction, by the write policy.

    A *staging* page is a host page that only carries bytes between device and disk, where there is no host tier.

    Args:
        tiers: without an executor in them the device is the only tier.
        on_lease_idle: called when no transfer of a lease is under way any more.
    """

    def __init__(self, tiers: Tiers, on_lease_idle: Callable[[CacheLease], None]) -> None:
        self._tiers = tiers
        self._pools = tiers.pools
        self._accounting = tiers.accounting
        self._on_lease_idle = on_lease_idle
        self.is_staging = not tiers.has_host
        """There is no host tier; host pages are staging pages."""
        self._queued: list[tuple[CacheLease, int, list[Node]]] = []
        self.backups: dict[int, BackupOp] = {}
        self.backing_up_pages = 0
        self.disk_writes = DiskWriteQueue(tiers, on_dropped=self._drop_host_page, on_written=self._written)
        policy = tiers.config.settings.write_policy
        has_lower_tier = tiers.executor is not None and (tiers.store is not None or tiers.has_host)
        self._is_selective = policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        self._writes_through = has_lower_tier and policy is not WritePolicy.WRITE_BACK
        self._writes_back = has_lower_tier and policy is WritePolicy.WRITE_BACK

    @property
    def is_busy(self) -> bool:
        """True while anything is queued or under way."""
        return bool(self._queued or self.backups or self.disk_writes.is_busy)

    def queued(self) -> list[tuple[CacheLease, int, list[Node]]]:
        """Backups that have not been submitted yet (for checks)."""
        return self._queued

    def staging_items(self) -> Iterable[PageTransfer]:
        """Items whose host page belongs to a transfer and not to the tree (for checks)."""
        if not self.is_staging:
            return
        for backup in self.backups.values():
            yield from backup.items
        yield from self.disk_writes.items()

    # -- write through --------------------------------------------------------------------------------------------

    def queue_backups(self, lease: CacheLease, group: int, nodes: Sequence[Node]) -> None:
        """``lease`` has computed or used these pages, which it holds: queue the backups that the policy asks for."""
        if not self._writes_through:
            return
        if self._is_selective:
            nodes = [node for node in nodes if node.hits >= 2]
        if not self.is_staging:
            nodes = [node for node in nodes if node.slot(group).host is None]
        wanted = [node for node in nodes if self._is_missing_below(group, node)]
        if not wanted:
            return
        if self.backing_up_pages + len(wanted) > self._tiers.config.queue_pages:
            self._accounting.drops["backup_queue_full"] += len(wanted)
            return
        self._pools.inc_lock_ref(group, wanted)
        lease.transfers += 1
        self.backing_up_pages += len(wanted)
        self._queued.append((lease, group, wanted))

    def _is_missing_below(self, group: int, node: Node) -> bool:
        """The page is on the device, and in none of the tiers that a backup would put it into."""
        slot = node.slot(group)
        if slot.device is None or slot.device.arriving is not None or slot.host is not None:
            return False
        return not self.is_staging or not self.disk_writes.is_stored_or_pending(group, node)

    def submit_queued(self) -> None:
        """Submit what has been queued since the last call: as one Backup, and disk writes."""
        if self._queued:
            queued, self._queued = self._queued, []
            items: list[PageTransfer] = []
            held: list[tuple[int, list[Node]]] = []
            for _, group, nodes in queued:
                held.append((group, nodes))
                items += self._stage(group, nodes)
            self._start_backup(items, held, [lease for lease, _, _ in queued])
        self.disk_writes.submit_queued()

    def _stage(self, group: int, nodes: Sequence[Node]) -> list[PageTransfer]:
        """A host page for each node that still needs one; nodes that get none are counted as drops."""
        items: list[PageTransfer] = []
        for node in nodes:
            if not self._is_missing_below(group, node):
                continue
            page = self.allocate_host_page(group)
            if page is None:
                self._accounting.drops["host_full"] += 1
                continue
            items.append(PageTransfer(group, node, node.slot(group).device, self._fill_host(group, node, page)))
        return items

    def _fill_host(self, group: int, node: Node, page: int) -> CachedPage:
        """The copy that a backup will fill; the caller, who starts the backup, marks it as arriving."""
        if self.is_staging:
            copy = CachedPage(node, page)
            self.disk_writes.add_pending(group, node)
        else:
            copy = self._pools.place_on_host(group, node, page)
        return copy

    def _start_backup(
        self, items: list[PageTransfer], held: list[tuple[int, list[Node]]], leases: list[CacheLease]
    ) -> None:
        op = BackupOp(next(self._tiers.ids), items, held, leases)
        for item in items:
            item.host.arriving = op
        if not items:
            self._end_backup(op)
            return
        self.backups[op.id] = op
        self._tiers.running_executor.submit(Backup(op.id, page_mappings(items)))

    def backup_done(self, done: Done) -> None:
        """A Backup has ended on every rank."""
        op = self.backups.pop(done.id)
        if done.ok:
            self._accounting.moved("device_host", len(op.items), done.nbytes, done.seconds)
        else:
            self._accounting.drops[done.reason or "backup_failed"] += len(op.items)
        evicting = not op.held
        for item in op.items:
            item.host.arriving = None
            if not done.ok:
                self._drop_host_page(item)
            elif self._tiers.store is not None and (self._writes_through or self.is_staging):
                self.disk_writes.enqueue(item)
            if evicting:
                assert item.device is not None, "an eviction without a device copy"
                if done.ok and not self.is_staging and not item.node.slot(item.group).lock_ref:
                    item.host.since = self._pools.now
                    self._pools.host_queue[item.group].add(item.host)
                self._reader_done(item.group, item.device)
        self._end_backup(op)

    def _end_backup(self, op: BackupOp) -> None:
        for group, nodes in op.held:
            self._pools.dec_lock_ref(group, nodes)
            self.backing_up_pages -= len(nodes)
        for lease in op.leases:
            lease.transfers -= 1
            if not lease.transfers:
                self._on_lease_idle(lease)

    def _drop_host_page(self, item: PageTransfer) -> None:
        """Free the host page of an item that was not backed up or not written."""
        if self.is_staging:
            self._pools.host[item.group].free(item.host.page)
            self.disk_writes.discard_pending(item.group, item.node)
        else:
            self._pools.drop_host(item.group, item.host)

    def _written(self, item: PageTransfer) -> None:
        """The disk tier does not read the item's host page any more."""
        if self.is_staging:
            item.host.readers -= 1
            self._pools.host[item.group].free(item.host.page)
        else:
            self._reader_done(item.group, item.host, host=True)

    # -- eviction -------------------------------------------------------------------------------------------------

    @property
    def is_saving(self) -> bool:
        """True while ``write_back`` saves evicted pages: waiting will free pages."""
        return self._writes_back and bool(self.backups or self.disk_writes.writes)

    def evict_device(self, group: int, count: int, *, lose: bool = True) -> bool:
        """Evict until ``count`` pages are free. False: not now (what was evicted until then stays evicted).

        ``lose``: a page that ``write_back`` cannot save, because the host tier has no room yet, is evicted
        all the same.
        """
        pool = self._pools.device[group]
        if pool.num_free >= count:
            return True
        if not self._writes_back:
            self._accounting.pages["device_evicted"] += self._pools.evict(group, count)
        dirty: list[PageTransfer] = []
        being_freed = self._being_freed(group)
        while pool.num_free + being_freed + len(dirty) < count:
            copy = self._pools.device_queue[group].first()
            if copy is None or not self._evict_device(group, copy, dirty, lose=lose):
                break
        self.disk_writes.submit_queued()
        if dirty:
            self._start_backup(dirty, [], [])
        return pool.num_free >= count

    def evict_ahead(self, device_pages: int, host_pages: int) -> None:
        """With ``write_back``: keep some pages free, so that the next allocation does not find only unsaved pages."""
        if not self._writes_back:
            return
        for group, pool in enumerate(self._pools.device):
            self.evict_device(group, min(device_pages, pool.size // 16), lose=False)
        if self._tiers.store is not None and not self.is_staging:
            for group, pool in enumerate(self._pools.host):
                wanted = min(host_pages, pool.size // 8)
                for _ in range(wanted - pool.num_free - len(self.disk_writes)):
                    copy = self._pools.host_queue[group].first()
                    if copy is None:
                        break
                    self._evict_host(group, copy)
        self.disk_writes.submit_queued()

    def evict_all_device(self, group: int) -> int:
        """Evict all unlocked pages, by the write policy; returns their number (some are freed only once saved)."""
        dirty: list[PageTransfer] = []
        count = 0
        while (copy := self._pools.device_queue[group].first()) is not None:
            self._evict_device(group, copy, dirty, lose=True)
            count += 1
        if dirty:
            self._start_backup(dirty, [], [])
        return count

    def evict_all_host(self, group: int) -> int:
        """The same for the host tier."""
        count = 0
        while (copy := self._pools.host_queue[group].first()) is not None:
            self._evict_host(group, copy)
            count += 1
        self.disk_writes.submit_queued()
        return count

    def drop_all_device(self, group: int) -> int:
        """Drop all unlocked pages without saving them; returns their number."""
        count = 0
        while (copy := self._pools.device_queue[group].first()) is not None:
            if copy.readers:
                self._pools.device_queue[group].remove(copy)
            else:
                self._pools.drop_device(group, copy)
            count += 1
        return count

    def drop_all_host(self, group: int) -> int:
        """The same for the host tier."""
        count = 0
        while (copy := self._pools.host_queue[group].first()) is not None:
            if copy.readers:
                self._pools.host_queue[group].remove(copy)
            else:
                self._pools.drop_host(group, copy)
            count += 1
        return count

    def _being_freed(self, group: int) -> int:
        """Device pages that will be free when the transfers that read them have ended."""
        evictions = (op for op in self.backups.values() if not op.held)
        items = (item for op in evictions for item in op.items if item.group == group)
        return sum(i.device is not None and i.device.prev is None and not i.node.slot(group).lock_ref for i in items)

    def _evict_device(self, group: int, copy: CachedPage, dirty: list[PageTransfer], *, lose: bool) -> bool:
        """Evict the first copy of the queue: now, or when a transfer that reads it has ended.

        One that must be saved first is added to ``dirty``. False: it could not be saved and stays.
        """
        queue = self._pools.device_queue[group]
        if copy.readers:
            queue.remove(copy)
            return True
        node = copy.node
        if self._writes_back and self._is_missing_below(group, node):
            page = self.allocate_host_page(group)
            if page is not None:
                queue.remove(copy)
                copy.readers += 1
                dirty.append(PageTransfer(group, node, copy, self._fill_host(group, node, page)))
                return True
            if not lose and len(self.disk_writes):
                return False
            self._accounting.drops["host_full"] += 1
        self._drop_device(group, copy)
        return True

    def _drop_device(self, group: int, copy: CachedPage) -> None:
        host = copy.node.slot(group).host
        if self._writes_back and host is not None and host.prev is not None:
            # While it was on the device, uses did not count for its host copy: that copy counts as used now.
            self._pools.host_queue[group].remove(host)
            self._pools.host_queue[group].add(host)
        self._pools.drop_device(group, copy)
        self._accounting.pages["device_evicted"] += 1

    def allocate_host_page(self, group: int) -> int | None:
        """Allocate a host page, evicting if needed; None: there is none now."""
        pool, queue = self._pools.host[group], self._pools.host_queue[group]
        while not pool.num_free:
            copy = queue.first()
            if copy is None:
                return None
            must_save = self._must_save(group, copy)
            if must_save and len(self.disk_writes) >= max(8, pool.size // 8):
                # Enough pages are being written; writing the whole tier to disk would not free a page sooner.
                return None
            self._evict_host(group, copy)
        return pool.allocate(1)[0]

    def _must_save(self, group: int, copy: CachedPage) -> bool:
        """With ``write_back``: the host copy is in no lower tier yet."""
        return (
            self._writes_back
            and self._tiers.store is not None
            and not copy.readers
            and not self.disk_writes.is_stored_or_pending(group, copy.node)
        )

    def _evict_host(self, group: int, copy: CachedPage) -> None:
        """Evict the first copy of the queue: now, or when it has been written to disk."""
        if self._must_save(group, copy):
            self.disk_writes.enqueue(PageTransfer(group, copy.node, None, copy))
        if copy.readers:
            self._pools.host_queue[group].remove(copy)
            return
        self._pools.drop_host(group, copy)
        self._accounting.pages["host_evicted"] += 1

    def _reader_done(self, group: int, copy: CachedPage, *, host: bool = False) -> None:
        """A transfer no longer reads ``copy``. If it was evicted meanwhile and no lease has locked it since, free it
        now."""
        copy.readers -= 1
        if copy.readers or copy.prev is not None or copy.node.slot(group).lock_ref:
            return
        if host:
            self._pools.drop_host(group, copy)
            self._accounting.pages["host_evicted"] += 1
        else:
            self._drop_device(group, copy)


def page_mappings(items: Sequence[PageTransfer]) -> tuple[PageMapping, ...]:
    """The items as page numbers per group, in order."""
    by_group: dict[int, tuple[list[int], list[int]]] = {}
    for item in items:
        device, host = by_group.setdefault(item.group, ([], []))
        assert item.device is not None, "a transfer between device and host without a device copy"
        device.append(item.device.page)
        host.append(item.host.page)
    return tuple(PageMapping(group, tuple(device), tuple(host)) for group, (device, host) in by_group.items())
