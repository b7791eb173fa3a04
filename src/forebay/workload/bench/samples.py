"""The measurements of one request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from forebay.workload.answers import ReportedUsage

__all__ = ["RequestSample"]


@dataclass(slots=True)
class RequestSample:
    """One request; times are seconds since the run began.

    Attributes:
        due: when it should have been sent; latencies count from here, so an open loop that falls behind does not
            shorten them.
        gaps: seconds between successive events with text; a server that puts several tokens into one event has fewer.
        reused_tokens: prompt tokens that the workload itself repeats from earlier prompts; None when unknown.
        error: kind of failure; the other fields then hold what was measured before it.
    """

    session: int
    turn: int
    due: float
    started: float
    first: float | None = None
    finished: float | None = None
    usage: ReportedUsage | None = None
    gaps: array[float] = field(default_factory=lambda: array("f"))
    reused_tokens: int | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it was answered with at least one token."""
        return self.error is None and self.first is not None

    @property
    def first_s(self) -> float:
        """Time to first token, from ``due``."""
        assert self.first is not None, "asked of finished requests only"
        return self.first - self.due

    @property
    def output_tokens(self) -> int:
        """Tokens generated: the server's count, else the number of events."""
        return self.usage.completion_tokens if self.usage else len(self.gaps) + (self.first is not None)
