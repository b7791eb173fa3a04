"""What the server is doing now, and what /health says about it."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Any

__all__ = ["Phase", "ServerState"]


class Phase(StrEnum):
    """The server's life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class ServerState:
    """Phase, start-up stage and progress; ``started_at`` is when the process began (seconds since the epoch).

    Nothing a 503 says may contain the letters o and k in a row, because people wait with
    ``curl -s .../health | grep -q ok``: what goes into those bodies comes from the fixed words here.
    """

    def __init__(self, started_at: float | None = None) -> None:
        self.phase = Phase.STARTING
        self.stage = "launched"
        self.progress: float | None = None
        self.started_at = time.time() if started_at is None else started_at
        self.history: list[tuple[str, float]] = [("launched", self.started_at)]
        """Every stage with when it began (seconds since the epoch)."""

    @property
    def is_ready(self) -> bool:
        return self.phase is Phase.READY

    def reach(self, stage: str, progress: float | None = None) -> bool:
        """Enter a stage or move on within it; True when it is a new one."""
        is_new = stage != self.stage
        self.stage, self.progress = stage, progress
        if is_new:
            self.history.append((stage, time.time()))
        return is_new

    def ready(self) -> None:
        """The first token was generated."""
        self.reach("ready", 1.0)
        self.phase = Phase.READY

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and body of /health."""
        if self.phase is Phase.READY:
            return 200, {"status": "ok", "stage": "ready", "uptime_s": round(time.time() - self.history[-1][1], 3)}
        body: dict[str, Any] = {"status": self.phase.value, "elapsed_s": round(time.time() - self.started_at, 3)}
        if self.phase is Phase.STARTING:
            body["stage"] = self.stage if "ok" not in self.stage.lower() else "starting"
            if self.progress is not None:
                body["progress"] = round(self.progress, 4)
                body["percent"] = round(100 * self.progress, 1)
        return 503, body

    def refusal(self) -> str:
        """Why no request is taken now, for the body of a 503."""
        if self.phase is Phase.STARTING:
            percent = "" if self.progress is None else f" ({self.progress:.0%})"
            stage = self.stage if "ok" not in self.stage.lower() else "starting"
            return f"The server is starting: {stage}{percent}. GET /health says when it is ready."
        if self.phase is Phase.DRAINING:
            return "The server is shutting down and finishes what it has begun."
        return "The server's engine has died; its log says why."
