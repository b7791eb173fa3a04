"""Builders for plans: a request in one line, on a machine that is never looked at."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from forebay.machine.interface import Machine
from forebay.machine.recorded import RecordedMachine
from forebay.planning.make_plan import PlanOptions, make_plan
from forebay.planning.plan import Plan

__all__ = ["GB", "GIB", "codes", "nowhere", "plan", "warned"]

GB, GIB = 10**9, 2**30
DATA = Path(__file__).parent.parent / "data"


def nowhere(folder: Path) -> Machine:
    """A recorded machine that shows nothing: whoever looks at it fails."""
    (folder / "looks.json").write_text("{}")
    return RecordedMachine(folder)


class _Unread:
    name = "unread"

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the plan looked at the machine: {name}")


def plan(model: str, server: str, flags: str = "", **options: Any) -> Plan:
    """A plan with the host's memory given, so that no machine is read."""
    said = {"host_memory_bytes": 449 * GB, **options}
    return make_plan(PlanOptions(model, server, server_flags=tuple(shlex.split(flags)), **said), _Unread())  # type: ignore[arg-type]


def codes(made: Plan) -> list[str]:
    return [item.code for item in made.problems]


def warned(made: Plan) -> list[str]:
    return [item.code for item in made.warnings]
