"""The engine's log: one line an event, for people and for the operator's log grammar.

    2026-11-30T23:50:01.123Z INFO stage rank=0 name="device pool" progress=0.5
    {"time": "2026-11-30T23:50:01.123Z", "level": "INFO", "event": "stage", "rank": 0, "name": "device pool", ...}

The third word is the event's name; the rest are key=value pairs, JSON-quoted where a value holds anything but the
letters, digits and ``_.:/+@%,-``. Values are never prompts or outputs. Lines go to standard error in one write each, so
that lines of several processes do not mix.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import traceback
from typing import Any

__all__ = ["EventLog", "bridge_logging"]

_PLAIN = re.compile(r"[A-Za-z0-9_.:/+@%,\-\[\]]+")


class EventLog:
    """Writes events of one process.

    Args:
        format: ``text`` or ``json``.
        fd: where lines go; standard error unless a test says otherwise.
        common: pairs that every line carries, such as ``rank=0``.
    """

    def __init__(self, format: str = "text", *, fd: int = 2, **common: Any) -> None:
        self._json = format == "json"
        self._fd = fd
        self._common = common

    def info(self, event: str, **pairs: Any) -> None:
        """Something a person following the log wants to see."""
        self._write("INFO", event, pairs)

    def warning(self, event: str, **pairs: Any) -> None:
        """It works, but not as asked."""
        self._write("WARNING", event, pairs)

    def error(self, event: str, **pairs: Any) -> None:
        """Something failed."""
        self._write("ERROR", event, pairs)

    def exception(self, event: str, error: BaseException, **pairs: Any) -> None:
        """A failure that is our bug, with its traceback on the same line."""
        trace = "".join(traceback.format_exception(error))
        self._write("ERROR", event, {**pairs, "error": f"{type(error).__name__}: {error}", "traceback": trace})

    def _write(self, level: str, event: str, pairs: dict[str, Any]) -> None:
        line = self.format(level, event, {**self._common, **pairs})
        try:
            os.write(self._fd, line.encode("utf-8", "replace") + b"\n")
        except OSError:
            return  # nobody reads the log any more; serving goes on

    def format(self, level: str, event: str, pairs: dict[str, Any]) -> str:
        """One line without its newline; pairs that are None are left out."""
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        known = {key: value for key, value in pairs.items() if value is not None}
        if self._json:
            return json.dumps({"time": stamp, "level": level, "event": event, **known}, default=str)
        words = [stamp, level, event, *(f"{key}={_text(value)}" for key, value in known.items())]
        return " ".join(words)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


class _Bridge(logging.Handler):
    def __init__(self, log: EventLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        write = self._log.error if record.levelno >= logging.ERROR else self._log.warning
        trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else None
        write("library", logger=record.name, message=record.getMessage(), traceback=trace)


def bridge_logging(log: EventLog) -> None:
    """Send warnings and errors of libraries (uvicorn, asyncio) through ``log``; nothing else prints."""
    root = logging.getLogger()
    root.handlers[:] = [_Bridge(log)]
    root.setLevel(logging.WARNING)
