"""Decode steps replayed: the operations of a step depend on its shape only, so each shape is recorded once.

A step of a small model is a few hundred operations of some ten microseconds; asking for each from Python costs as much
as a tenth of them. Every argument of theirs is an address or a size: scratch stays where it is, the step's own arrays
are filled in place, and so the same bytes do the next step of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

__all__ = ["DecodeGraphs", "GraphRecorder", "recorder_of"]

_MAX_PROGRAMS = 256


class GraphRecorder(Protocol):
    """A back end that can record and replay."""

    def record(self, run: Callable[[], None]) -> bytes:
        """Do ``run`` and return its operations."""

    def replay(self, program: bytes) -> None:
        """Do them again."""


def recorder_of(backend: Any) -> GraphRecorder | None:
    """The back end, if it can record."""
    return cast(GraphRecorder, backend) if hasattr(backend, "record") and hasattr(backend, "replay") else None


class DecodeGraphs:
    """Recorded steps by shape, dropped when anything they point at moves.

    Args:
        recorder: the back end.
        generation: a value that changes when scratch or the step's arrays move.
    """

    def __init__(self, recorder: GraphRecorder, generation: Callable[[], object]) -> None:
        self._recorder = recorder
        self._generation = generation
        self._made_at: object = None
        self._programs: dict[object, bytes] = {}
        self._results: dict[object, Any] = {}

    def run(self, shape: object, forward: Callable[[], Any]) -> Any:
        """Do a step of this shape: by ``forward`` the first time,
        whose result (a tensor in scratch) is every later one's.
        """
        if self._generation() != self._made_at or len(self._programs) > _MAX_PROGRAMS:
            self._programs.clear()
            self._results.clear()
        program = self._programs.get(shape)
        if program is not None:
            self._recorder.replay(program)
            return self._results[shape]
        kept: list[Any] = []
        program = self._recorder.record(lambda: kept.append(forward()))
        now = self._generation()
        if now == self._made_at:  # else the step itself moved scratch, and its program may point at what it left
            self._programs[shape] = program
            self._results[shape] = kept[0]
        self._made_at = now
        return kept[0]
