"""What a rule is: data that says which event means which cause, what else must hold, and what to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from forebay.causes import Cause
from forebay.operation.doctor.activities import ProcessActivity
from forebay.operation.doctor.evidence_base import EventMatch
from forebay.operation.doctor.records import Confidence

__all__ = ["Kind", "Priority", "Requirement", "Rule"]


class Kind(StrEnum):
    """What a rule is about."""

    ROOT = "root"  # why a server failed: counts only in a log that shows a failure
    DEGRADED = "degraded"  # a server that runs, wrongly


class Priority(IntEnum):
    """How much a match says; a lower one is preferred wherever it stands in the log."""

    SPECIFIC = 0  # names the cause
    GENERAL = 1  # names a class of failure, which a specific one may explain
    SECONDARY = 2  # says that something failed elsewhere


@dataclass(frozen=True, slots=True)
class Requirement:
    """Another event that must (or must not) be in the log.

    Attributes:
        event: a name from ``event_patterns/``.
        place: ``any``, ``before`` or ``after`` the match, or ``block``: the same traceback, with its header and message.
    """

    event: str
    place: str = "any"


Fix = Callable[[EventMatch], str]
Check = Callable[[EventMatch], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the doctor's knowledge.

    Attributes:
        id: a name for tests and bug reports.
        cause: the cause it concludes.
        event: the event it starts from (a name from ``event_patterns/``); its fields feed ``fix``.
        meaning: what happened, in a sentence; ``{field}`` is filled from the event. Text in ``[…]`` with a field that the
            event does not have is left out.
        fix: from the match to what to change, with the value to try.
        priority: how much the event says.
        servers: whose logs it applies to; empty: any. A rule of one server also tells whose log it is.
        activities: what the process must have been doing; empty: anything.
        needs, excludes: other events that must, or must not, be there.
        check: a condition on numbers.
        confidence: how sure the cause is where the conditions hold; None: certain for a specific rule, else likely.
        rules_out: causes the evidence looks like, each with why it is not that.
        cases: recorded logs that prove it (names under tests/data/cases, or captures).
    """

    id: str
    cause: Cause
    event: str
    meaning: str
    fix: Fix
    kind: Kind = Kind.ROOT
    priority: Priority = Priority.SPECIFIC
    servers: tuple[str, ...] = ()
    activities: tuple[ProcessActivity, ...] = ()
    needs: tuple[Requirement, ...] = ()
    excludes: tuple[Requirement, ...] = ()
    check: Check | None = None
    confidence: Confidence | None = None
    rules_out: tuple[tuple[Cause, str], ...] = ()
    cases: tuple[str, ...] = ()
