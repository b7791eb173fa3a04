"""Stop strings in a stream: nothing that may be the beginning of one goes out before it is certain."""

from __future__ import annotations

__all__ = ["StopStringMatcher"]


class StopStringMatcher:
    """Cuts one sequence's text at the first stop string.

    Args:
        stops: the strings; none of them empty.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Take new text; returns what may be shown. After a stop string was found, nothing more ever is."""
        if not self._stops:
            return text
        if self.is_stopped:
            return ""
        text = self._held + text
        found = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=-1)
        if found >= 0:
            self.is_stopped = True
            self._held = ""
            return text[:found]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text held back, when the sequence ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of ``stop`` that ``text`` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
