"""Exit codes and the exceptions that carry them.

    ForebayError                a failure with a message for a person; ``exit_code`` says which family
      UsageError       (2)      bad usage or input: the user can fix it
      RefusedError     (3)      it does not fit, or may not be done
        HostUnreachableError    another machine cannot be reached, or not be used
      DeadError        (4)      the server is dead
      TimeIsUpError    (5)      a deadline passed
      StalledError     (6)      stalled or hung
      NotInEffectError (7)      asked for but not in effect
      LeftBehindError  (8)      ``down`` could not remove everything
      FailedRowsError  (9)      ``generate`` finished with failed rows

Any other exception is a bug in forebay: exit 1, one line on the terminal, the traceback in
$FOREBAY_HOME/last_error.txt.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "DeadError",
    "ExitCode",
    "FailedRowsError",
    "ForebayError",
    "HostUnreachableError",
    "LeftBehindError",
    "NotInEffectError",
    "RefusedError",
    "StalledError",
    "TimeIsUpError",
    "UsageError",
]


class ExitCode(IntEnum):
    """Process exit codes of every command; documented in the README."""

    DONE = 0
    BUG = 1
    USAGE = 2
    REFUSED = 3
    DEAD = 4
    TIME_IS_UP = 5
    STALLED = 6
    NOT_IN_EFFECT = 7
    LEFT_BEHIND = 8
    FAILED_ROWS = 9
    INTERRUPTED = 130


class ForebayError(Exception):
    """A failure to show to a person: what, where, and what to do about it.

    Args:
        message: one line: what was being done, what was found, what the limit is.
        fix: what to change, with the value to try; None when there is nothing to try.
        code: a ``forebay.causes.Cause`` value, when the failure has a documented code.
    """

    exit_code: ExitCode = ExitCode.BUG

    def __init__(self, message: str, *, fix: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.code = code


class UsageError(ForebayError):
    """Bad usage or input."""

    exit_code = ExitCode.USAGE


class RefusedError(ForebayError):
    """It does not fit, or another owner holds it."""

    exit_code = ExitCode.REFUSED


class HostUnreachableError(RefusedError):
    """Another machine cannot be reached, or lacks what is needed there."""


class DeadError(ForebayError):
    """The server is dead."""

    exit_code = ExitCode.DEAD


class TimeIsUpError(ForebayError):
    """A deadline passed."""

    exit_code = ExitCode.TIME_IS_UP


class StalledError(ForebayError):
    """No sign of progress."""

    exit_code = ExitCode.STALLED


class NotInEffectError(ForebayError):
    """Asked for, but not in effect."""

    exit_code = ExitCode.NOT_IN_EFFECT


class LeftBehindError(ForebayError):
    """Something the run owned is still there."""

    exit_code = ExitCode.LEFT_BEHIND


class FailedRowsError(ForebayError):
    """A data job finished, with failed rows."""

    exit_code = ExitCode.FAILED_ROWS
