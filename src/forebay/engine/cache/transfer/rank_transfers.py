"""The transfers of one rank: carries out Backup and LoadBack records on threads beside compute."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from forebay.engine.cache.actions import Backup, DecisionDigest, Done, LoadBack
from forebay.engine.cache.host.region import READ_FAILED, READ_PENDING
from forebay.engine.cache.transfer.copier import PageCopier
from forebay.engine.cache.transfer.layer_events import LayerDoneCounter, LoadEvents
from forebay.engine.cache.transfer.worker_thread import WorkerThread

__all__ = ["RankTransfers"]

log = logging.getLogger(__name__)
_FINISHED_KEPT = 4096


class RankTransfers:
    """Three threads: backups, loads from the host tier, and loads whose host pages are still arriving from disk.

    Args:
        copier: copies the bytes.
        num_layers: the model's layers.
        read_status: the host region's status slots, in which rank 0 says whether a disk read is complete.
        before: called with ``"backup"`` or ``"load"`` (and ``"load_layer"`` for each layer) before bytes are
            copied; what it raises fails the transfer. For tests that inject faults.
        threaded: False: nothing runs until a thread's ``run_one`` is called.
        idle: what a load does while it waits for the disk.
        give_up_s: a load that waits longer than this for the disk fails.
        clock: seconds.
    """

    def __init__(
        self,
        copier: PageCopier,
        num_layers: int,
        read_status: npt.NDArray[np.int64],
        *,
        before: Callable[[str], None] = lambda point: None,
        threaded: bool = True,
        idle: Callable[[], object] = lambda: time.sleep(0.0002),
        give_up_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._copier = copier
        self._num_layers = num_layers
        self._read_status = read_status
        self._before = before
        self._idle = idle
        self._give_up_s = give_up_s
        self._clock = clock
        self._done: deque[Done] = deque()
        self.some_done = threading.Event()
        """Set whenever a record has ended; cleared by ``take_done``."""
        self._progress: OrderedDict[int, LayerDoneCounter] = OrderedDict()
        self._digest = DecisionDigest()
        self.backups = WorkerThread("backup", self._back_up, threaded=threaded)
        self.loads = WorkerThread("load", self._load, threaded=threaded)
        self.disk_loads = WorkerThread("load-disk", self._load, threaded=threaded)

    def submit(self, action: Backup | LoadBack) -> None:
        """Start one record; returns at once. Records must be submitted in the order in which rank 0 issued them."""
        self._digest.add(action)
        if isinstance(action, Backup):
            self.backups.put(action)
            return
        self._progress[action.id] = LayerDoneCounter()
        while len(self._progress) > _FINISHED_KEPT:
            self._progress.popitem(last=False)
        (self.loads if action.status_slot < 0 else self.disk_loads).put(action)

    def take_done(self) -> list[Done]:
        """Records that have ended since the last call."""
        self.some_done.clear()
        ended = []
        while self._done:
            ended.append(self._done.popleft())
        return ended

    def layer_events(self, ids: tuple[int, ...], timeout_s: float) -> LoadEvents:
        """The layer events of LoadBack records that were submitted here."""
        return LoadEvents(ids, [self._progress[i] for i in ids], timeout_s, self._clock)

    def digest(self) -> tuple[int, int]:
        """(number of records, hash): equal on ranks that were given the same records."""
        return self._digest.value()

    def close(self) -> bool:
        """Finish what is queued; False: a thread is still busy, and the buffers must stay."""
        ended = [thread.close() for thread in (self.backups, self.loads, self.disk_loads)]
        return all(ended)

    def _back_up(self, action: Backup) -> None:
        started = self._clock()
        try:
            self._before("backup")
            moved = sum(self._copier.back_up(mapping) for mapping in action.mappings)
        except Exception as error:  # noqa: BLE001 - whatever failed, the pages must be released
            log.warning("backup %d failed: %s", action.id, error)
            self._finish(Done(action.id, False, reason="backup_failed"))
            return
        self._finish(Done(action.id, True, moved, self._clock() - started))

    def _load(self, action: LoadBack) -> None:
        progress = self._progress.get(action.id) or LayerDoneCounter()
        started = self._clock()
        moved = 0
        try:
            self._before("load")
            self._await_disk(action)
            for layer in range(self._num_layers):
                self._before("load_layer")
                moved += sum(self._copier.load_layer(mapping, layer) for mapping in action.mappings)
                progress.advance(layer + 1)
        except Exception as error:  # noqa: BLE001 - whatever failed, the step must recompute
            progress.fail()
            log.warning("load %d failed: %s", action.id, error)
            self._finish(Done(action.id, False, reason="load_failed"))
            return
        self._finish(Done(action.id, True, moved, self._clock() - started))

    def _await_disk(self, action: LoadBack) -> None:
        """Return when the record's host pages have arrived from disk, or at once if they were in the host tier."""
        if action.status_slot < 0:
            return
        deadline = self._clock() + self._give_up_s
        while (state := int(self._read_status[action.status_slot])) == READ_PENDING:
            if self._clock() > deadline:
                raise TimeoutError(f"its pages did not arrive from disk within {self._give_up_s:.0f} s")
            self._idle()
        if state == READ_FAILED:
            raise OSError("its pages could not be read from disk")

    def _finish(self, done: Done) -> None:
        self._done.append(done)
        self.some_done.set()
