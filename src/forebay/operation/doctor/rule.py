"""What a rule is: data that says which line means which cause, what else must hold, and what to change."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

from forebay.causes import Cause
from forebay.servers.log_patterns import LogLine

if TYPE_CHECKING:
    from forebay.operation.doctor.transcript import Transcript

__all__ = ["Found", "Kind", "Need", "Priority", "Rule", "Where", "pattern"]


def pattern(text: str, *, ignore_case: bool = False) -> re.Pattern[str]:
    """A compiled pattern; blanks in it match any run of blanks, so that wrapped text is found too."""
    return re.compile(text, re.IGNORECASE if ignore_case else 0)


class Kind(StrEnum):
    """What a rule is about."""

    ROOT = "root"  # why a server failed: counts only in a log that shows a failure
    DEGRADED = "degraded"  # a server that runs, wrongly


class Priority(IntEnum):
    """How much a match says; a lower one is preferred wherever it stands in the log."""

    SPECIFIC = 0  # names the cause
    GENERAL = 1  # names a class of failure, which a specific one may explain
    FALLOUT = 2  # says that something failed elsewhere


class Where(StrEnum):
    """Which lines a rule looks at."""

    ERROR = (
        "error"  # exceptions, ERROR lines, crash output; never INFO, WARNING, a server's own messages, or source code
    )
    STACK = "stack"  # the frames of tracebacks: file lines and their code
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Need:
    """What else must (or must not) stand in the log.

    Attributes:
        pattern: searched in the text of lines.
        place: ``any``, ``before`` or ``after`` the match, or ``block``: the same traceback, with its header and
            message.
    """

    pattern: re.Pattern[str]
    place: str = "any"


@dataclass(frozen=True, slots=True)
class Found:
    """A match of a rule, with all that a condition or a fix may want."""

    match: re.Match[str]
    line: LogLine
    source: int
    index: int
    transcript: Transcript

    def text(self, group: str, fallback: str = "") -> str:
        """A named group's text, or ``fallback``."""
        return self.match.groupdict().get(group) or fallback

    def number(self, group: str) -> float | None:
        """A named group as a number (thousands commas allowed), or None."""
        found = self.match.groupdict().get(group)
        try:
            return float(found.replace(",", "")) if found else None
        except ValueError:
            return None


Fix = Callable[[Found], str]
Check = Callable[[Found], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the doctor's knowledge.

    Attributes:
        id: a name for tests and bug reports.
        cause: the cause it concludes.
        pattern: searched in the text of each line that ``where`` admits; its groups feed ``fix``.
        meaning: what happened, in a sentence; ``{group}`` is filled from the match.
        fix: from the match to what to change, with the value to try.
        servers: whose logs it applies to; empty: any. A rule of one server also tells whose log it is.
        needs, excludes: what else must, or must not, stand in the log.
        check: a condition on numbers.
        rules_out: causes the evidence looks like, each with why it is not that.
        cases: recorded logs that prove it (names under tests/data/cases, or captures).
    """

    id: str
    cause: Cause
    pattern: re.Pattern[str]
    meaning: str
    fix: Fix
    kind: Kind = Kind.ROOT
    tier: Priority = Priority.SPECIFIC
    where: Where = Where.ERROR
    servers: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    excludes: tuple[Need, ...] = ()
    check: Check | None = None
    rules_out: tuple[tuple[Cause, str], ...] = ()
    cases: tuple[str, ...] = ()
