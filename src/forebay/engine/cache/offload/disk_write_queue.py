"""Host pages on their way to disk: what is queued, what is being written, and what is there already."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from forebay.engine.cache.accounting import Accounting
from forebay.engine.cache.actions import DiskPage, DiskWrite, Done
from forebay.engine.cache.disk.store import DiskStore
from forebay.engine.cache.offload.operations import PageTransfer, WriteOp
from forebay.engine.cache.radix.node import Node
from forebay.engine.cache.transfer.executor import TransferExecutor

__all__ = ["DiskQueue"]

_WRITE_BATCH = 64
"""Pages of one DiskWrite."""


class DiskQueue:
    """Pages on their way from the host to disk. A page's host copy has a reader while it is.

    Args:
        executor: carries out the writes; None: there is no tier below the device.
        store: the disk tier; None: nothing is ever queued.
        staging: host pages belong to their transfer and not to the tree.
        queue_pages: pages on their way at most; more are dropped and counted.
        ids: numbers for actions.
        accounting: counters.
        forget: frees the staging page of an item that is not written.
        written: called for each item whose write has ended, well or not.
    """

    def __init__(
        self,
        executor: TransferExecutor | None,
        store: DiskStore | None,
        *,
        staging: bool,
        queue_pages: int,
        ids: itertools.count[int],
        accounting: Accounting,
        forget: Callable[[PageTransfer], None],
        written: Callable[[PageTransfer], None],
    ) -> None:
        self._executor = executor
        self._store = store
        self._staging = staging
        self._queue_pages = queue_pages
        self._ids = ids
        self._accounting = accounting
        self._forget = forget
        self._written = written
        self._waiting: list[PageTransfer] = []
        self._on_way: set[tuple[int, bytes]] = set()
        self.writes: dict[int, WriteOp] = {}

    def __len__(self) -> int:
        """Pages on their way, those still being backed up to a staging page included."""
        return len(self._on_way)

    @property
    def busy(self) -> bool:
        """True while anything is queued or being written."""
        return bool(self._waiting or self.writes)

    def items(self) -> Iterable[PageTransfer]:
        """Queued and being written (for checks)."""
        for write in self.writes.values():
            yield from write.items
        yield from self._waiting

    def is_on_disk(self, group: int, node: Node) -> bool:
        """On disk, or on its way there."""
        assert self._store is not None, "a question about the disk without a disk tier"
        assert node.digest is not None, "a page without an address with a disk tier"
        return (group, node.digest) in self._on_way or self._store.has(group, node.digest)

    def expect(self, group: int, node: Node) -> None:
        """A staging page for this node is being filled: nobody else starts another."""
        if node.digest is not None:
            self._on_way.add((group, node.digest))

    def leave(self, group: int, node: Node) -> None:
        """The page is not on its way any more."""
        if node.digest is not None:
            self._on_way.discard((group, node.digest))

    def send(self, item: PageTransfer) -> None:
        """Queue a host page, unless it is on disk or too much is waiting."""
        if not self._staging:
            if self.is_on_disk(item.group, item.node):
                return
            self.expect(item.group, item.node)
        if len(self._on_way) > self._queue_pages:
            self._accounting.drops["disk_queue_full"] += 1
            self.leave(item.group, item.node)
            if self._staging:
                self._forget(item)
            return
        item.host.readers += 1
        self._waiting.append(item)

    def start(self) -> None:
        """Send what is queued to the executor."""
        while self._waiting:
            items, self._waiting = self._waiting[:_WRITE_BATCH], self._waiting[_WRITE_BATCH:]
            op = WriteOp(next(self._ids), items)
            self.writes[op.id] = op
            assert self._executor is not None, "a disk write without an executor"
            pages = [DiskPage(i.group, i.node.digest or b"", i.node.key, i.host.page) for i in items]
            self._executor.submit(DiskWrite(op.id, tuple(pages)))

    def write_done(self, done: Done) -> None:
        """A DiskWrite has ended."""
        op = self.writes.pop(done.id)
        self._accounting.moved("host_disk", len(op.items) - len(done.bad), done.nbytes, done.seconds)
        self._accounting.dropped(why for _, why in done.bad)
        for item in op.items:
            self.leave(item.group, item.node)
            self._written(item)
