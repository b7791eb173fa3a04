"""A possible cause, as found by a rule, in the machine's records, or by what the log does not show."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.causes import Cause
from forebay.operation.doctor.records import Confidence, Evidence
from forebay.operation.doctor.rule import Priority

__all__ = ["Candidate"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible cause.

    Attributes:
        priority, order: its place among others; smaller sorts first.
        index: of the line it rests on in the transcript; None for a record of the machine.
        confidence: how sure it is, where it is chosen.
    """

    cause: Cause
    priority: Priority
    order: tuple[float, ...]
    meaning: str
    fix: str
    evidence: tuple[Evidence, ...]
    rules_out: tuple[tuple[Cause, str], ...] = ()
    server: str = ""
    index: int | None = None
    confidence: Confidence = Confidence.LIKELY
