"""Downwards: what is backed up from the device to the host and from there to disk,
and what goes when room is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from forebay.engine.cache.accounting import Accounting
from forebay.engine.cache.actions import Backup, Done, PageMapping
from forebay.engine.cache.config import WritePolicy
from forebay.engine.cache.disk.store import DiskStore
from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.offload.disk_write_queue import DiskQueue
from forebay.engine.cache.offload.operations import BackupOp, PageTransfer
from forebay.engine.cache.pools.cache_pools import CachePools
from forebay.engine.cache.radix.node import CachedPage, Node
from forebay.engine.cache.transfer.executor import TransferExecutor

__all__ = ["OffloadManager", "pieces"]


class OffloadManager:
    """Backups, disk writes and eviction, by the write policy.

    A *staging* page is a host page that only carries bytes between device and disk, where there is no host tier.

    Args:
        residency: where pages are.
        executor: None: the device tier is all there is.
        store: the disk tier, if there is one.
        staging: there is no host tier; host pages are only for staging.
        policy: the write policy.
        queue_pages: pages being backed up, and pages being written to disk, at most.
        ids: numbers for actions.
        accounting: counters.
        lease_free: called when a lease has no transfer left.
    """

    def __init__(
        self,
        residency: CachePools,
        executor: TransferExecutor | None,
        store: DiskStore | None,
        *,
        staging: bool,
        policy: WritePolicy,
        queue_pages: int,
        ids: itertools.count[int],
        accounting: Accounting,
        lease_free: Callable[[CacheLease], None],
    ) -> None:
        self._residency = residency
        self._executor = executor
        self._store = store
        self.staging = staging
        self._policy = policy
        self._queue_pages = queue_pages
        self._ids = ids
        self._accounting = accounting
        self._lease_free = lease_free
        self._queued: list[tuple[CacheLease, int, list[Node]]] = []
        self.backups: dict[int, BackupOp] = {}
        self.to_disk = DiskQueue(
            executor,
            store,
            staging=staging,
            queue_pages=queue_pages,
            ids=ids,
            accounting=accounting,
            forget=self._forget_host,
            written=self._written,
        )
        self.backing_up_pages = 0
        has_lower_tier = executor is not None and (store is not None or not staging)
        self._ahead = has_lower_tier and policy is not WritePolicy.WRITE_BACK
        self._back = has_lower_tier and policy is WritePolicy.WRITE_BACK

    @property
    def busy(self) -> bool:
        """True while anything is queued or under way."""
        return bool(self._queued or self.backups or self.to_disk.busy)

    def queued(self) -> list[tuple[CacheLease, int, list[Node]]]:
        """Backups that have not been sent yet (for checks)."""
        return self._queued

    def staging_items(self) -> Iterable[PageTransfer]:
        """Items whose host page belongs to a transfer and not to the tree (for checks)."""
        if not self.staging:
            return
        for backup in self.backups.values():
            yield from backup.items
        yield from self.to_disk.items()

    # -- write through --------------------------------------------------------------------------------------------

    def used(self, lease: CacheLease, group: int, nodes: Sequence[Node]) -> None:
        """``lease`` has computed or used these pages, which it holds: queue the backups that the policy asks for."""
        if not self._ahead:
            return
        if self._policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            nodes = [node for node in nodes if node.hits >= 2]
        if not self.staging:
            nodes = [node for node in nodes if node.slot(group).host is None]
        wanted = [node for node in nodes if self._is_missing_below(group, node)]
        if not wanted:
            return
        if self.backing_up_pages + len(wanted) > self._queue_pages:
            self._accounting.drops["backup_queue_full"] += len(wanted)
            return
        self._residency.hold(group, wanted)
        lease.transfers += 1
        self.backing_up_pages += len(wanted)
        self._queued.append((lease, group, wanted))

    def _is_missing_below(self, group: int, node: Node) -> bool:
        """The page is on the device and in no tier that a backup would put it into."""
        slot = node.slot(group)
        if slot.device is None or slot.device.arriving is not None or slot.host is not None:
            return False
        return not self.staging or not self.to_disk.is_on_disk(group, node)

    def start_queued(self) -> None:
        """Send what has been queued since the last call as one Backup, and what is to go to disk."""
        if self._queued:
            queued, self._queued = self._queued, []
            items: list[PageTransfer] = []
            held: list[tuple[int, list[Node]]] = []
            for _, group, nodes in queued:
                held.append((group, nodes))
                items += self._stage(group, nodes)
            self._start_backup(items, held, [lease for lease, _, _ in queued])
        self.to_disk.start()

    def _stage(self, group: int, nodes: Sequence[Node]) -> list[PageTransfer]:
        """A host page for each node that still needs one; those that get none are counted."""
        items: list[PageTransfer] = []
        for node in nodes:
            if not self._is_missing_below(group, node):
                continue
            page = self.host_page(group)
            if page is None:
                self._accounting.drops["host_full"] += 1
                continue
            items.append(PageTransfer(group, node, node.slot(group).device, self._fill_host(group, node, page)))
        return items

    def _fill_host(self, group: int, node: Node, page: int) -> CachedPage:
        """The copy that a backup will fill; whoever starts the backup marks it as arriving."""
        if self.staging:
            copy = CachedPage(node, page)
            self.to_disk.expect(group, node)
        else:
            copy = self._residency.place_on_host(group, node, page)
        return copy

    def _start_backup(
        self, items: list[PageTransfer], held: list[tuple[int, list[Node]]], leases: list[CacheLease]
    ) -> None:
        op = BackupOp(next(self._ids), items, held, leases)
        for item in items:
            item.host.arriving = op
        if not items:
            self._end_backup(op)
            return
        self.backups[op.id] = op
        assert self._executor is not None, "a backup without an executor"
        self._executor.submit(Backup(op.id, pieces(items)))

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
                self._forget_host(item)
            elif self._store is not None and (self._ahead or self.staging):
                self.to_disk.send(item)
            if evicting:
                assert item.device is not None, "an eviction without a device copy"
                if done.ok and not self.staging and not item.node.slot(item.group).lock:
                    item.host.since = self._residency.now
                    self._residency.host_queue[item.group].add(item.host)
                self._reading_ended(item.group, item.device)
        self._end_backup(op)

    def _end_backup(self, op: BackupOp) -> None:
        for group, nodes in op.held:
            self._residency.release(group, nodes)
            self.backing_up_pages -= len(nodes)
        for lease in op.leases:
            lease.transfers -= 1
            if not lease.transfers:
                self._lease_free(lease)

    def _forget_host(self, item: PageTransfer) -> None:
        """Free the host page of an item that did not make it."""
        if self.staging:
            self._residency.host[item.group].give(item.host.page)
            self.to_disk.leave(item.group, item.node)
        else:
            self._residency.drop_host(item.group, item.host)

    def _written(self, item: PageTransfer) -> None:
        """The disk tier does not read the item's host page any more."""
        if self.staging:
            item.host.readers -= 1
            self._residency.host[item.group].give(item.host.page)
        else:
            self._reading_ended(item.group, item.host, host=True)

    # -- eviction -------------------------------------------------------------------------------------------------

    @property
    def is_saving(self) -> bool:
        """True while ``write_back`` moves evicted pages down: waiting will free pages."""
        return self._back and bool(self.backups or self.to_disk.writes)

    def make_device_room(self, group: int, count: int, *, lose: bool = True) -> bool:
        """Evict until ``count`` pages are free. False: not now (what was evicted until then stays evicted).

        ``lose``: a page that ``write_back`` cannot save, because the host tier has no room yet, goes all the same.
        """
        pool = self._residency.device[group]
        if pool.free >= count:
            return True
        if not self._back:
            self._accounting.pages["device_evicted"] += self._residency.evict(group, count)
        dirty: list[PageTransfer] = []
        leaving = self._leaving(group)
        while pool.free + leaving + len(dirty) < count:
            copy = self._residency.device_queue[group].first()
            if copy is None or not self._evict_device(group, copy, dirty, lose=lose):
                break
        self.to_disk.start()
        if dirty:
            self._start_backup(dirty, [], [])
        return pool.free >= count

    def keep_reserve(self, device_pages: int, host_pages: int) -> None:
        """With ``write_back``: evict ahead of need, so that the next allocation does not find only unsaved pages."""
        if not self._back:
            return
        for group, pool in enumerate(self._residency.device):
            self.make_device_room(group, min(device_pages, pool.size // 16), lose=False)
        if self._store is not None and not self.staging:
            for group, pool in enumerate(self._residency.host):
                wanted = min(host_pages, pool.size // 8)
                for _ in range(wanted - pool.free - len(self.to_disk)):
                    copy = self._residency.host_queue[group].first()
                    if copy is None:
                        break
                    self._evict_host(group, copy)
        self.to_disk.start()

    def evict_all_device(self, group: int) -> int:
        """Evict everything that nobody holds, by the write policy; returns pages (some go once they are backed up)."""
        dirty: list[PageTransfer] = []
        count = 0
        while (copy := self._residency.device_queue[group].first()) is not None:
            self._evict_device(group, copy, dirty, lose=True)
            count += 1
        if dirty:
            self._start_backup(dirty, [], [])
        return count

    def evict_all_host(self, group: int) -> int:
        """The same for the host tier."""
        count = 0
        while (copy := self._residency.host_queue[group].first()) is not None:
            self._evict_host(group, copy)
            count += 1
        self.to_disk.start()
        return count

    def drop_all_device(self, group: int) -> int:
        """Forget everything that nobody holds, without saving it."""
        count = 0
        while (copy := self._residency.device_queue[group].first()) is not None:
            if copy.readers:
                self._residency.device_queue[group].remove(copy)
            else:
                self._residency.drop_device(group, copy)
            count += 1
        return count

    def drop_all_host(self, group: int) -> int:
        """The same for the host tier."""
        count = 0
        while (copy := self._residency.host_queue[group].first()) is not None:
            if copy.readers:
                self._residency.host_queue[group].remove(copy)
            else:
                self._residency.drop_host(group, copy)
            count += 1
        return count

    def _leaving(self, group: int) -> int:
        """Device pages that will be free when the transfers that read them have ended."""
        evictions = (op for op in self.backups.values() if not op.held)
        items = (item for op in evictions for item in op.items if item.group == group)
        return sum(i.device is not None and i.device.prev is None and not i.node.slot(group).lock for i in items)

    def _evict_device(self, group: int, copy: CachedPage, dirty: list[PageTransfer], *, lose: bool) -> bool:
        """The first in line goes: now, or when a transfer that reads it has ended (it joins ``dirty`` if that is ours).

        False: it could not be saved and stays.
        """
        queue = self._residency.device_queue[group]
        if copy.readers:
            queue.remove(copy)
            return True
        node = copy.node
        if self._back and self._is_missing_below(group, node):
            page = self.host_page(group)
            if page is not None:
                queue.remove(copy)
                copy.readers += 1
                dirty.append(PageTransfer(group, node, copy, self._fill_host(group, node, page)))
                return True
            if not lose and len(self.to_disk):
                return False
            self._accounting.drops["host_full"] += 1
        self._drop_device(group, copy)
        return True

    def _drop_device(self, group: int, copy: CachedPage) -> None:
        host = copy.node.slot(group).host
        if self._back and host is not None and host.prev is not None:
            # A page that leaves the device counts as used in the host tier now: it was, until now, the device's.
            self._residency.host_queue[group].remove(host)
            self._residency.host_queue[group].add(host)
        self._residency.drop_device(group, copy)
        self._accounting.pages["device_evicted"] += 1

    def host_page(self, group: int) -> int | None:
        """A host page, evicting if needed; None: not now."""
        pool, queue = self._residency.host[group], self._residency.host_queue[group]
        while not pool.free:
            copy = queue.first()
            if copy is None:
                return None
            must_save = self._must_save(group, copy)
            if must_save and len(self.to_disk) >= max(8, pool.size // 8):
                # Enough is on its way already; sending the whole tier to disk would not free a page sooner.
                return None
            self._evict_host(group, copy)
        return pool.take(1)[0]

    def _must_save(self, group: int, copy: CachedPage) -> bool:
        """With ``write_back``: the host copy is in no lower tier yet."""
        return (
            self._back
            and self._store is not None
            and not copy.readers
            and not self.to_disk.is_on_disk(group, copy.node)
        )

    def _evict_host(self, group: int, copy: CachedPage) -> None:
        """The first in line goes; now, or when its way to disk is over."""
        if self._must_save(group, copy):
            self.to_disk.send(PageTransfer(group, copy.node, None, copy))
        if copy.readers:
            self._residency.host_queue[group].remove(copy)
            return
        self._residency.drop_host(group, copy)
        self._accounting.pages["host_evicted"] += 1

    def _reading_ended(self, group: int, copy: CachedPage, *, host: bool = False) -> None:
        """A transfer no longer reads ``copy``; if its turn to go came meanwhile, and nobody took it since,
        it goes now.
        """
        copy.readers -= 1
        if copy.readers or copy.prev is not None or copy.node.slot(group).lock:
            return
        if host:
            self._residency.drop_host(group, copy)
            self._accounting.pages["host_evicted"] += 1
        else:
            self._drop_device(group, copy)


def pieces(items: Sequence[PageTransfer]) -> tuple[PageMapping, ...]:
    """The items as pages of each group, in order."""
    by_group: dict[int, tuple[list[int], list[int]]] = {}
    for item in items:
        device, host = by_group.setdefault(item.group, ([], []))
        assert item.device is not None, "a transfer between device and host without a device copy"
        device.append(item.device.page)
        host.append(item.host.page)
    return tuple(PageMapping(group, tuple(device), tuple(host)) for group, (device, host) in by_group.items())
