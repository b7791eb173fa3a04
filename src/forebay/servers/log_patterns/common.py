"""What the servers' logs share: argparse, tracebacks, and progress bars."""

from __future__ import annotations

import re

from forebay.servers.log_patterns.pattern import ErrorMark

__all__ = ["ARGPARSE_ERROR", "BARE_EXCEPTION", "EXCEPTION", "PROGRAM_FRAME", "TRACEBACK", "crossed", "progress"]

TRACEBACK = re.compile(r"^Traceback \(most recent call last\):|: Traceback \(most recent call last\):$")
EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Za-z_]\w{0,80}(?:Error|Exception|Interrupt|Exit|Timeout|Iteration|NotFound|ExceptionGroup)"
    r"|Exception)(?:: (?P<message>.*)|:?$)"
)
"""The last line of a traceback: a type and, after a colon, the first line of its message."""

PROGRAM_FRAME = re.compile(
    r'^ +File "(?:<frozen runpy>", line \d+, in _run_module_as_main|'
    r'[^"]*(?:launch\w*\.py|/bin/\w+)", line \d+, in <module>)'
)
"""A traceback's first frame, where it is the program's own first: nothing caught the exception.
(One that is caught and printed begins at the frame that caught it.)"""

ARGPARSE_ERROR = re.compile(r"^[\w./ -]{1,80}: error: (?P<message>.+)")
"""argparse's last word, after its usage."""

FATAL_SIGNAL = re.compile(r"^Fatal Python error: (?P<message>.+)")

COMMON_ERRORS = (ErrorMark(ARGPARSE_ERROR), ErrorMark(FATAL_SIGNAL))

BARE_EXCEPTION = ErrorMark(
    re.compile(r"^(?!KeyboardInterrupt|SystemExit|asyncio\.exceptions\.CancelledError)" + EXCEPTION.pattern[1:])
)
"""An exception that nothing caught; only where a server's own messages always carry a prefix."""


def progress(words: str) -> re.Pattern[str]:
    """A tqdm bar whose description starts with ``words``: percent, done, total, time left and rate."""
    return re.compile(
        words + r"[^|%\r]*?:?\s+(?P<percent>\d+)%(?:.*?\|\s*(?P<done>\d+)/(?P<total>\d+)"
        r"(?: \[[\d:?]+<(?P<left>[\d:?]+),\s*(?P<rate>[^\]]+?)\])?)?"
    )


def crossed(*parts: str) -> re.Pattern[str]:
    """One pattern that matches any of ``parts``."""
    return re.compile("|".join(parts))
