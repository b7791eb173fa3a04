"""Rank 0's executor: sends transfer records to every rank and to the disk threads, and reports which are complete."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from forebay.engine.cache.actions import Action, Backup, DiskPage, DiskRead, DiskWrite, Done, LoadBack
from forebay.engine.cache.disk.store import DiskStore
from forebay.engine.cache.host.region import READ_COMPLETE, READ_FAILED, READ_PENDING, HostRegion
from forebay.engine.cache.transfer.layer_events import LoadEvents
from forebay.engine.cache.transfer.rank_transfers import RankTransfers
from forebay.engine.cache.transfer.worker_thread import WorkerThread

__all__ = ["DiskThreads", "RankExecutor", "TransferExecutor"]


class TransferExecutor(Protocol):
    """Carries out the cache's transfers."""

    def submit(self, action: Action) -> None:
        """Start it on every rank; returns at once."""

    def completed(self) -> list[Done]:
        """Actions that have ended on every rank since the last call."""

    def wait(self, timeout_s: float) -> None:
        """Sleep until something has ended, at most ``timeout_s``."""

    def layer_events(self, ids: tuple[int, ...], timeout_s: float) -> LoadEvents:
        """This rank's layer events of LoadBack records that were submitted."""

    def acquire_status_slot(self) -> int | None:
        """A free status slot for a disk read; None: all are in use."""

    def release_status_slot(self, status_slot: int) -> None:
        """The read that used it has ended on every rank."""


class DiskThreads:
    """Rank 0's reading and writing of the disk store, with a thread for each.

    Args:
        store: the files.
        region: where pages are read from and written to.
        threaded: False: nothing runs until a thread's ``run_one`` is called.
        clock: seconds.
    """

    def __init__(
        self,
        store: DiskStore,
        region: HostRegion,
        *,
        threaded: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._region = region
        self._clock = clock
        self.done: deque[Done] = deque()
        self.some_done = threading.Event()
        self.writes: WorkerThread[DiskWrite] = WorkerThread("disk-write", self._write, threaded=threaded)
        self.reads: WorkerThread[DiskRead] = WorkerThread("disk-read", self._read, threaded=threaded)

    def close(self) -> bool:
        """Finish what is queued and close the store; False: a thread hangs, and the store is left open."""
        if not all([self.writes.close(), self.reads.close()]):
            return False
        self.store.close()
        return True

    def _page(self, page: DiskPage) -> memoryview:
        return self._region.page(page.group, page.host_page)

    def _write(self, action: DiskWrite) -> None:
        started = self._clock()
        bad: list[tuple[int, str]]
        try:
            bad = self.store.write(action.pages, [self._page(p) for p in action.pages])
        except BaseException:
            self._finish(Done(action.id, False, bad=tuple((i, "disk_write_error") for i in range(len(action.pages)))))
            raise
        self._finish(self._result(action, bad, started))

    def _read(self, action: DiskRead) -> None:
        started = self._clock()
        status = self._region.read_status
        try:
            bad = self.store.read(action.pages, [self._page(p) for p in action.pages])
        except BaseException:
            status[action.status_slot] = READ_FAILED
            self._finish(Done(action.id, False, bad=tuple((i, "disk_read_error") for i in range(len(action.pages)))))
            raise
        status[action.status_slot] = READ_FAILED if bad else READ_COMPLETE
        self._finish(self._result(action, bad, started))

    def _result(self, action: DiskWrite | DiskRead, bad: list[tuple[int, str]], started: float) -> Done:
        failed = {i for i, _ in bad}
        moved = sum(self._region.page_bytes[p.group] for i, p in enumerate(action.pages) if i not in failed)
        return Done(action.id, not bad, moved, self._clock() - started, tuple(bad))

    def _finish(self, done: Done) -> None:
        self.done.append(done)
        self.some_done.set()


class RankExecutor:
    """The executor of a server with any number of ranks.

    Rank 0's transfers and the disk threads are here. The other ranks get Backup and LoadBack records through
    ``broadcast``, in order, and ``collect`` returns their results. A record is complete when every rank has reported
    it.

    Args:
        local: rank 0's transfers.
        region: the node's host pages.
        disk: the disk tier's threads, if there is one.
        ranks: number of ranks.
        broadcast: sends a record to the other ranks; not called with one rank.
        collect: (rank, result) for each report that has arrived from another rank; must not block.
    """

    def __init__(
        self,
        local: RankTransfers,
        region: HostRegion,
        disk: DiskThreads | None = None,
        *,
        ranks: int = 1,
        broadcast: Callable[[Backup | LoadBack], None] | None = None,
        collect: Callable[[], Iterable[tuple[int, Done]]] = tuple,
    ) -> None:
        self.local = local
        self.disk = disk
        self._region = region
        self._ranks = ranks
        self._broadcast = broadcast
        self._collect = collect
        self._reports: dict[int, list[Done]] = {}
        self._reported: dict[int, set[int]] = {}
        self._complete: deque[Done] = deque()
        self._free_status_slots = list(range(len(region.read_status)))
        if disk is not None:
            # One event wakes the waiting cache, whichever thread has finished.
            disk.some_done = local.some_done

    def submit(self, action: Action) -> None:
        if isinstance(action, DiskWrite | DiskRead):
            assert self.disk is not None, "a disk action without a disk tier"
            if isinstance(action, DiskWrite):
                self.disk.writes.put(action)
            else:
                self._region.read_status[action.status_slot] = READ_PENDING
                self.disk.reads.put(action)
            return
        if self._broadcast is not None and self._ranks > 1:
            self._broadcast(action)
        self.local.submit(action)

    def _report(self, rank: int, done: Done) -> None:
        reported = self._reported.setdefault(done.id, set())
        assert rank not in reported, f"rank {rank} reported transfer {done.id} twice"
        reported.add(rank)
        reports = self._reports.setdefault(done.id, [])
        reports.append(done)
        if len(reports) == self._ranks:
            del self._reports[done.id], self._reported[done.id]
            reasons = [d.reason for d in reports if d.reason]
            moved = sum(d.nbytes for d in reports)
            slowest = max(d.seconds for d in reports)
            ok = all(d.ok for d in reports)
            self._complete.append(Done(done.id, ok, moved, slowest, reason=reasons[0] if reasons else ""))

    def completed(self) -> list[Done]:
        for done in self.local.take_done():
            self._report(0, done)
        for rank, done in self._collect():
            self._report(rank, done)
        ended = []
        while self._complete:
            ended.append(self._complete.popleft())
        if self.disk is not None:
            while self.disk.done:
                ended.append(self.disk.done.popleft())
        return ended

    def wait(self, timeout_s: float) -> None:
        self.local.some_done.wait(timeout_s)

    def layer_events(self, ids: tuple[int, ...], timeout_s: float) -> LoadEvents:
        return self.local.layer_events(ids, timeout_s)

    def acquire_status_slot(self) -> int | None:
        return self._free_status_slots.pop() if self._free_status_slots else None

    def release_status_slot(self, status_slot: int) -> None:
        self._free_status_slots.append(status_slot)

    def digest(self) -> tuple[int, int]:
        """(number of records, hash) of what was issued; another rank's transfers must say the same."""
        return self.local.digest()

    def close(self) -> bool:
        """Finish what is queued; False: a transfer hangs, and pools and region must stay mapped."""
        ended = self.local.close()
        return (self.disk is None or self.disk.close()) and ended
