"""How a step waits, layer by layer, for pages that are still arriving (``LayerEvents`` of model_executor/step.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

__all__ = ["LayerDoneCounter", "LoadEvents"]


class LayerDoneCounter:
    """How many layers of one load have arrived on one rank. The transfer thread advances it, the step waits for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._layers = 0
        self._failed = False

    def advance(self, layers: int) -> None:
        """The model's layers 0 .. layers - 1 are on the device."""
        with self._changed:
            self._layers = layers
            self._changed.notify_all()

    def fail(self) -> None:
        """The rest will not arrive."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def is_settled(self, layer: int) -> bool:
        """True when ``wait`` would not block: ``layer`` has arrived, or never will."""
        return self._failed or self._layers > layer

    def wait(self, layer: int, timeout_s: float) -> bool:
        """Block until ``layer`` has arrived; False: it failed, or ``timeout_s`` passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._layers > layer, timeout_s)
            return self._layers > layer and not self._failed


class LoadEvents:
    """The layers of all loads that a lease's pages come from.

    Args:
        ids: the LoadBack records' ids, by which other ranks make their own events.
        loads: this rank's progress of each.
        timeout_s: waiting allowed over all layers together; after that the loads count as failed.
        clock: seconds.
    """

    def __init__(
        self,
        ids: tuple[int, ...],
        loads: Sequence[LayerDoneCounter],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ids = ids
        self.timeout_s = timeout_s
        self._loads = loads
        self._clock = clock
        self._left_s = timeout_s
        self.failed = False
        self.waited_s = 0.0
        """Time for which steps waited here."""

    def wait_layer(self, layer: int) -> bool:
        """Block until ``layer`` (the model's numbering) has arrived; False when a load failed or is too slow."""
        if self.failed:
            return False
        for load in self._loads:
            started = self._clock()
            arrived = load.wait(layer, self._left_s)
            took = self._clock() - started
            self.waited_s += took
            self._left_s = max(0.0, self._left_s - took)
            if not arrived:
                self.failed = True
                return False
        return True

    def has_arrived(self, layer: int) -> bool:
        """True when ``wait_layer(layer)`` would return at once. Never blocks."""
        return self.failed or all(load.is_settled(layer) for load in self._loads)
