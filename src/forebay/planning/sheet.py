"""The sheet a plan is worked out on: numbers with their origin, problems and warnings, in the order they were found."""

from __future__ import annotations

from typing import TypeVar

from forebay.causes import Cause
from forebay.planning.plan import How, Problem, Step

__all__ = ["Sheet"]

_N = TypeVar("_N", int, float, int | None, float | None)


class Sheet:
    """Collects; decides nothing."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []

    def put(self, key: str, label: str, value: _N, unit: str, how: How, note: str) -> _N:
        """Write down a number and return it."""
        self.steps.append(Step(key, label, value, unit, how, note))
        return value

    def refuse(self, code: Cause, message: str, fix: str) -> None:
        """It cannot work."""
        self.problems.append(Problem(code.value, message, fix))

    def warn(self, code: Cause, message: str, fix: str) -> None:
        """It starts, and is not what the user wants."""
        self.warnings.append(Problem(code.value, message, fix))
