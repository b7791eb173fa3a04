"""What ``up`` needs from the planner, as plain records; ``cli/_planner.py`` connects the two rooms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forebay.machine.interface import Machine

__all__ = ["Planner", "UpPlan", "UpPlanRequest"]


@dataclass(frozen=True, slots=True)
class UpPlanRequest:
    """What to plan; sizes in bytes, None where the planner decides."""

    model: str
    server: str
    version: str | None
    tp: int | None
    context: int | None
    host_cache_bytes: int | None
    device_cache_bytes: int | None
    server_flags: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class UpPlan:
    """Whether the plan fits, its command, and the whole plan as `forebay plan --json` prints it."""

    fits: bool
    command: tuple[str, ...]
    env: Mapping[str, str]
    document: dict[str, Any]


Planner = Callable[[UpPlanRequest, Machine], UpPlan]
