"""One thread that carries out actions in order, beside compute."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["WorkerThread"]

A = TypeVar("A")
log = logging.getLogger(__name__)


class WorkerThread(Generic[A]):
    """First in, first out. What ``work`` raises is logged; it is expected to turn failures into results itself.

    Args:
        name: for the thread and the log.
        work: carries out one action; called on the thread.
        threaded: False: nothing runs until ``run_one`` is called (so that tests decide the order of events).
    """

    def __init__(self, name: str, work: Callable[[A], None], *, threaded: bool = True) -> None:
        self._name = name
        self._work = work
        self._pending: deque[A] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name=f"forebay-{name}", daemon=True)
            self._thread.start()

    def put(self, action: A) -> None:
        """Queue an action; returns at once."""
        with self._wake:
            self._pending.append(action)
            self._wake.notify()

    def __len__(self) -> int:
        """Actions that have not been started."""
        return len(self._pending)

    def run_one(self) -> bool:
        """Carry out the next action on the caller's thread; False: there was none."""
        with self._wake:
            if not self._pending:
                return False
            action = self._pending.popleft()
        self._work(action)
        return True

    def close(self, timeout_s: float = 5.0) -> bool:
        """Finish what is queued and end the thread; False: it is still busy after ``timeout_s``."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._pending:
                    if self._stopping:
                        return
                    self._wake.wait()
            try:
                self.run_one()
            except Exception:
                # If the thread ended here, pages would stay locked for ever; the log shows the bug.
                log.exception("the %s thread could not carry out an action", self._name)
