"""A growing log, line by line, into a stage and an error line."""

from __future__ import annotations

from forebay.machine.interface import Machine
from forebay.servers.log_patterns import GRAMMARS, StageTracker
from forebay.servers.log_patterns.pattern import Stage

__all__ = ["LogFollower"]


class LogFollower:
    """Follows ``path``; starts over when the file is replaced.

    Args:
        server: the server whose log patterns are used; without patterns only the length is read.
    """

    def __init__(self, machine: Machine, path: str, server: str) -> None:
        self._machine = machine
        self._path = path
        self._server = server
        self._begin()
        self._inode: int | None = None

    def _begin(self) -> None:
        self._tracker = StageTracker(self._server) if self._server in GRAMMARS else None
        self._rest = b""
        self.size_bytes = 0
        self._shown: str | None = None

    def read(self) -> list[str]:
        """Read what is new. Returns the line that said the start is lost, once, when it appears."""
        try:
            tail = self._machine.tail(self._path, self.size_bytes, self._inode)
        except OSError:
            return []
        if tail.replaced:
            self._begin()
        self._inode, self.size_bytes = tail.inode, tail.offset
        if self._tracker is None or not tail.data:
            return []
        lines = (self._rest + tail.data).split(b"\n")
        # a progress bar redraws its line without ending it: the unfinished line is read too
        self._rest = lines.pop()
        for line in lines:
            self._tracker.feed(line.decode("utf-8", "replace"))
        if b"%" in self._rest:
            self._tracker.feed(self._rest.decode("utf-8", "replace"))
        error = self.error_line
        if error is not None and error != self._shown:
            self._shown = error
            return [error]
        return []

    @property
    def stage(self) -> str:
        """The furthest stage the log shows; empty before any."""
        if self._tracker is None or self._tracker.stage is Stage.PREFLIGHT:
            return ""
        return str(self._tracker.stage)

    @property
    def percent(self) -> float | None:
        """Progress within the stage, 0 to 100."""
        return None if self._tracker is None else self._tracker.percent

    @property
    def doing(self) -> str:
        """What the server is doing within the stage, in its own words; mostly empty."""
        return "" if self._tracker is None else self._tracker.doing

    @property
    def error_line(self) -> str | None:
        """The first line that said the start is lost."""
        error = None if self._tracker is None else self._tracker.error
        return None if error is None else error.text[:500]
