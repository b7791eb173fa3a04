"""Upwards: pages that a request wants and that are in the host or disk tier are brought to the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from forebay.engine.cache.accounting import Accounting, Rates
from forebay.engine.cache.actions import DiskPage, DiskRead, Done, LoadBack
from forebay.engine.cache.interface import Tier
from forebay.engine.cache.lease import CacheLease
from forebay.engine.cache.offload.offload_manager import OffloadManager, pieces
from forebay.engine.cache.offload.operations import LoadOp, PageTransfer
from forebay.engine.cache.pools.cache_pools import CachePools
from forebay.engine.cache.prefix_match import DISK, HOST, Match
from forebay.engine.cache.radix.node import CachedPage, Node
from forebay.engine.cache.transfer.executor import TransferExecutor

__all__ = ["LoadBackManager"]


class LoadBackManager:
    """Loads under way.

    Args:
        residency: where pages are.
        executor: None: there is nothing to load from.
        spill: makes room.
        page_bytes: canonical bytes of each group's page.
        load_timeout_s: least time after which a load is given up.
        ids: numbers for actions.
        accounting: counters.
        rates: told what transfers measured.
        lease_free: called when a lease has no transfer left.
        settled: called when all of a lease's loads have arrived.
    """

    def __init__(
        self,
        residency: CachePools,
        executor: TransferExecutor | None,
        spill: OffloadManager,
        *,
        page_bytes: list[int],
        load_timeout_s: float,
        ids: itertools.count[int],
        accounting: Accounting,
        rates: Rates,
        lease_free: Callable[[CacheLease], None],
        settled: Callable[[CacheLease], None],
    ) -> None:
        self._residency = residency
        self._executor = executor
        self._spill = spill
        self._page_bytes = page_bytes
        self._load_timeout_s = load_timeout_s
        self._ids = ids
        self._accounting = accounting
        self._rates = rates
        self._lease_free = lease_free
        self._settled = settled
        self.loads: dict[int, LoadOp] = {}
        self._by_read: dict[int, LoadOp] = {}

    @property
    def busy(self) -> bool:
        """True while a load or disk read is under way."""
        return bool(self.loads)

    def staging_items(self) -> Iterable[PageTransfer]:
        """Items whose host page belongs to a load and not to the tree (for checks)."""
        if self._spill.staging:
            for op in self.loads.values():
                yield from op.items

    # -- starting -------------------------------------------------------------------------------------------------

    def take_pages(self, match: Match, nodes: list[Node]) -> dict[int, list[PageTransfer]] | None:
        """Device pages for all that must be loaded, and host pages for what comes from disk.

        The caller holds the nodes and has freed the device pages. Returns items by HOST and DISK, each in the order of
        the sequence, or None when there are no host pages now and nothing was taken.
        """
        wanted: list[tuple[int, int, int]] = []
        for group, places in enumerate(match.where):
            first = match.first[group]
            wanted += [(group, i, places[i]) for i in range(first, match.length) if places[i] >= HOST]
        host_pages: list[tuple[int, int]] = []
        for group, _, place in wanted:
            if place == DISK:
                page = self._spill.host_page(group)
                if page is None:
                    for taken_group, taken in host_pages:
                        self._residency.host[taken_group].give(taken)
                    return None
                host_pages.append((group, page))
        fresh = iter(host_pages)
        items: dict[int, list[PageTransfer]] = {HOST: [], DISK: []}
        for group, index, place in wanted:
            node = nodes[index]
            device = self._residency.place_on_device(group, node, self._residency.device[group].take(1)[0])
            host = node.slot(group).host
            if place == DISK:
                page = next(fresh)[1]
                host = (
                    CachedPage(node, page) if self._spill.staging else self._residency.place_on_host(group, node, page)
                )
            assert host is not None, "a host copy vanished while its slot was held"
            items[place].append(PageTransfer(group, node, device, host))
        return items

    def start(self, lease: CacheLease, items: dict[int, list[PageTransfer]]) -> None:
        """Send the loads of ``items`` on their way; ``lease`` waits for them."""
        for place, tier in ((HOST, Tier.HOST), (DISK, Tier.DISK)):
            if items[place]:
                op = self._start_one(lease, tier, items[place])
                lease.transfers += 1
                self.wait_for(lease, op)

    def _start_one(self, lease: CacheLease, tier: Tier, items: list[PageTransfer]) -> LoadOp:
        assert self._executor is not None, "a load without an executor"
        op = LoadOp(next(self._ids), tier, items, lease)
        self.loads[op.id] = op
        for item in items:
            self._residency.hold(item.group, (item.node,))
            assert item.device is not None, "a load without a device copy"
            item.device.arriving = op
            if tier is Tier.DISK:
                item.host.arriving = op
        if tier is Tier.DISK:
            word = self._executor.take_word()
            assert word is not None, "the caller has seen that there is a control word"
            op.word, op.read_id = word, next(self._ids)
            self._by_read[op.read_id] = op
            pages = [DiskPage(i.group, i.node.digest or b"", i.node.key, i.host.page) for i in items]
            self._executor.submit(DiskRead(op.read_id, tuple(pages), word))
        self._executor.submit(LoadBack(op.id, pieces(items), op.word))
        return op

    @staticmethod
    def wait_for(lease: CacheLease, op: LoadOp) -> None:
        """``lease`` uses pages of ``op``."""
        if op not in lease.waits_for:
            lease.waits_for = (*lease.waits_for, op)
            op.waiting.append(lease)

    def make_gate(self, lease: CacheLease) -> None:
        """Give ``lease`` a gate over everything it waits for."""
        if not lease.waits_for:
            return
        assert self._executor is not None, "a gate without an executor"
        host = sum(self._op_bytes(op) for op in lease.waits_for)
        disk = sum(self._op_bytes(op) for op in lease.waits_for if op.tier is Tier.DISK)
        estimate = self._rates.load_seconds(host - disk, disk)
        timeout_s = max(self._load_timeout_s, 4 * estimate)
        lease.gate = self._executor.gate(tuple(op.id for op in lease.waits_for), timeout_s)

    def _op_bytes(self, op: LoadOp) -> int:
        return sum(self._page_bytes[item.group] for item in op.items)

    # -- ending ---------------------------------------------------------------------------------------------------

    def load_done(self, done: Done) -> None:
        """A Load has ended on every rank."""
        op = self.loads[done.id]
        op.load_ok = done.ok
        if done.ok:
            way = "host_device" if op.tier is Tier.HOST else "disk_device"
            self._accounting.moved(way, len(op.items), done.nbytes, done.seconds)
            if op.tier is Tier.HOST:
                self._rates.host.note(self._op_bytes(op), done.seconds)
        else:
            self._accounting.loads_failed += 1
            self._accounting.drops[done.reason or "load_failed"] += len(op.items)
        if op.over:
            self._end(op)

    def read_done(self, done: Done) -> None:
        """A DiskRead has ended."""
        op = self._by_read.pop(done.id)
        op.read_id = -1
        op.bad = {i for i, _ in done.bad}
        self._accounting.moved("disk_host", len(op.items) - len(op.bad), done.nbytes, done.seconds)
        self._accounting.dropped(why for _, why in done.bad)
        self._rates.disk.note(done.nbytes, done.seconds)
        if op.over:
            self._end(op)

    def _end(self, op: LoadOp) -> None:
        """Both the load and its disk read are over: copies are good or go, leases go on."""
        del self.loads[op.id]
        if op.word >= 0 and self._executor is not None:
            self._executor.give_word(op.word)
        for i, item in enumerate(op.items):
            assert item.device is not None, "a load without a device copy"
            item.device.arriving = None
            if not op.load_ok:
                self._residency.drop_device(item.group, item.device)
            if op.tier is Tier.DISK:
                self._end_host(item, i in op.bad)
        for group in {item.group for item in op.items}:
            self._residency.release(group, [item.node for item in op.items if item.group == group])
        for lease in op.waiting:
            if op.load_ok:
                lease.waits_for = tuple(other for other in lease.waits_for if other is not op)
                if not lease.waits_for:
                    self._settled(lease)
        owner, op.owner = op.owner, None
        if owner is not None:
            owner.transfers -= 1
            if not owner.transfers:
                self._lease_free(owner)

    def _end_host(self, item: PageTransfer, bad: bool) -> None:
        item.host.arriving = None
        if self._spill.staging:
            self._residency.host[item.group].give(item.host.page)
        elif bad:
            self._residency.drop_host(item.group, item.host)

    def give_up(self, lease: CacheLease) -> None:
        """``lease`` does not wait any longer; its loads end by themselves."""
        for op in lease.waits_for:
            op.waiting.remove(lease)
            if op.owner is lease:
                op.owner = None
                lease.transfers -= 1
        lease.waits_for = ()
        lease.gate = None
