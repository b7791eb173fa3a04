"""Read a run's events as they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.runs.run_record import Run

__all__ = ["EventTail"]


class EventTail:
    """The events of ``run`` from byte ``offset`` of its events.jsonl on."""

    def __init__(self, run: Run, *, offset: int = 0) -> None:
        self._run = run
        self.offset = offset

    def new(self) -> list[Mapping[str, Any]]:
        """The events written since the last call; ``offset`` is then behind them."""
        events, self.offset = self._run.events_from(self.offset)
        return events
