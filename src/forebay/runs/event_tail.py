"""Reading a run's events as they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.runs.run_record import Run

__all__ = ["EventTail"]


class EventTail:
    """The events of ``run`` not seen yet; ``from_now`` skips those already written."""

    def __init__(self, run: Run, *, from_now: bool = False) -> None:
        self._run = run
        self._offset = run.events_path.stat().st_size if from_now and run.events_path.exists() else 0

    def new(self) -> list[Mapping[str, Any]]:
        """What was written since the last call."""
        events, self._offset = self._run.events_from(self._offset)
        return events
