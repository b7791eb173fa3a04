"""Why a server died: the doctor's answer in the few words that an event and a terminal need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.machine.interface import Machine
from forebay.operation.record import Run
from forebay.operation.subject import Target

__all__ = ["Diagnosis", "diagnose_run", "diagnose_target"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A cause code with its evidence lines and the fix."""

    cause: str
    evidence: tuple[str, ...] = ()
    fix: str | None = None

    def fields(self) -> dict[str, object]:
        """As JSON."""
        return {"cause": self.cause, "cause_evidence": list(self.evidence), "fix": self.fix}


def diagnose_run(run: Run, machine: Machine) -> Diagnosis:
    """The cause of ``run``'s death, from its log, its exit code and what the machine recorded."""
    return Diagnosis("unknown")


def diagnose_target(machine: Machine, target: Target, server: str, evidence: Sequence[str]) -> Diagnosis:
    """The cause of a death seen from outside."""
    return Diagnosis("unknown")
