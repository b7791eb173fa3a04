"""A possible cause, as found by a rule or in the machine's records."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.causes import Cause
from forebay.operation.doctor.records import Evidence
from forebay.operation.doctor.rule import Priority

__all__ = ["Candidate"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible cause with its rank among others: smaller sorts first."""

    cause: Cause
    tier: Priority
    order: tuple[float, ...]
    meaning: str
    fix: str
    evidence: tuple[Evidence, ...]
    rules_out: tuple[tuple[Cause, str], ...] = ()
    server: str = ""
