"""Where a command's events and lines go: a terminal, JSON lines, or the connection to the user's machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

__all__ = ["Launching", "Output", "always", "make_event"]

Launching = Callable[[], AbstractContextManager[bool]]
"""Entered around a launch; False: nobody waits for it any more, launch nothing."""


@contextmanager
def always() -> Iterator[bool]:
    """For a launch in the process of the command itself."""
    yield True


class Output(Protocol):
    """Takes what a command shows while it runs."""

    def event(self, event: Mapping[str, Any], *, offset: int | None = None) -> None:
        """One event. ``offset``: where the run's events.jsonl goes on after it, for events that come from there."""

    def say(self, text: str) -> None:
        """A line for a person."""


def make_event(kind: str, **fields: object) -> dict[str, Any]:
    """An event of this moment."""
    return {"schema": 1, "at": round(time.time(), 3), "event": kind, **fields}
