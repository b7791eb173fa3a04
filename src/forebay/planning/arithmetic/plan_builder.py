"""The sheet a plan is worked out on: numbers with their origin, problems and warnings, in the order they were found."""

from __future__ import annotations

from typing import TypeVar

from forebay.causes import Cause
from forebay.planning.plan import Problem, Provenance, Quantity

__all__ = ["PlanBuilder"]

_N = TypeVar("_N", int, float, int | None, float | None)


class PlanBuilder:
    """Collects; decides nothing."""

    def __init__(self) -> None:
        self.steps: list[Quantity] = []
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []

    def put(self, key: str, label: str, value: _N, unit: str, how: Provenance, note: str) -> _N:
        """Write down a number and return it."""
        self.steps.append(Quantity(key, label, value, unit, how, note))
        return value

    def refuse(self, code: Cause, message: str, fix: str) -> None:
        """It cannot work."""
        self.problems.append(Problem(code.value, message, fix))

    def warn(self, code: Cause, message: str, fix: str) -> None:
        """It starts, and is not what the user wants."""
        self.warnings.append(Problem(code.value, message, fix))
