"""Host pages on their way to disk: queued, being written, and which pages are on disk already."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from forebay.engine.cache.actions import DiskPage, DiskWrite, Done
from forebay.engine.cache.offload.operations import PageTransfer, WriteOp
from forebay.engine.cache.radix.node import Node
from forebay.engine.cache.tiers import Tiers

__all__ = ["DiskWriteQueue"]

_WRITE_BATCH = 64
"""Pages of one DiskWrite."""


class DiskWriteQueue:
    """Pages on their way from the host to disk. Until a page is written, its host copy has a reader.

    Args:
        tiers: without a disk tier in them nothing is ever queued.
        on_dropped: called with an item whose staging page is not written, to free the page.
        on_written: called with each item whose write has ended, whether it worked or not.
    """

    def __init__(
        self, tiers: Tiers, on_dropped: Callable[[PageTransfer], None], on_written: Callable[[PageTransfer], None]
    ) -> None:
        self._tiers = tiers
        self._is_staging = not tiers.has_host
        self._on_dropped = on_dropped
        self._on_written = on_written
        self._waiting: list[PageTransfer] = []
        self._pending: set[tuple[int, bytes]] = set()
        self.writes: dict[int, WriteOp] = {}

    def __len__(self) -> int:
        """Pages on their way, including those that are still being backed up to a staging page."""
        return len(self._pending)

    @property
    def is_busy(self) -> bool:
        """True while anything is queued or being written."""
        return bool(self._waiting or self.writes)

    def items(self) -> Iterable[PageTransfer]:
        """Queued and being written (for checks)."""
        for write in self.writes.values():
            yield from write.items
        yield from self._waiting

    def is_stored_or_pending(self, group: int, node: Node) -> bool:
        """True if the page is on disk or on its way there."""
        assert self._tiers.store is not None, "a question about the disk without a disk tier"
        assert node.digest is not None, "a page without an address with a disk tier"
        return (group, node.digest) in self._pending or self._tiers.store.has(group, node.digest)

    def add_pending(self, group: int, node: Node) -> None:
        """A staging page for this node is being filled; no second one is started."""
        if node.digest is not None:
            self._pending.add((group, node.digest))

    def discard_pending(self, group: int, node: Node) -> None:
        """The page is not on its way any more."""
        if node.digest is not None:
            self._pending.discard((group, node.digest))

    def enqueue(self, item: PageTransfer) -> None:
        """Queue a host page, unless it is on disk or too many are waiting."""
        if not self._is_staging:
            if self.is_stored_or_pending(item.group, item.node):
                return
            self.add_pending(item.group, item.node)
        if len(self._pending) > self._tiers.config.queue_pages:
            self._tiers.accounting.drops["disk_queue_full"] += 1
            self.discard_pending(item.group, item.node)
            if self._is_staging:
                self._on_dropped(item)
            return
        item.host.readers += 1
        self._waiting.append(item)

    def submit_queued(self) -> None:
        """Hand what is queued to the executor."""
        while self._waiting:
            items, self._waiting = self._waiting[:_WRITE_BATCH], self._waiting[_WRITE_BATCH:]
            op = WriteOp(next(self._tiers.ids), items)
            self.writes[op.id] = op
            pages = [DiskPage(i.group, i.node.digest or b"", i.node.key, i.host.page) for i in items]
            self._tiers.running_executor.submit(DiskWrite(op.id, tuple(pages)))

    def write_done(self, done: Done) -> None:
        """A DiskWrite has ended."""
        op = self.writes.pop(done.id)
        accounting = self._tiers.accounting
        accounting.moved("host_disk", len(op.items) - len(done.bad), done.nbytes, done.seconds)
        accounting.dropped(why for _, why in done.bad)
        for item in op.items:
            self.discard_pending(item.group, item.node)
            self._on_written(item)
