"""Why a server died: the doctor's answer in the few words that an event and a terminal need.

The doctor reads logs and the machine's records. The watch has seen more: which process went first, and who took the
port. Where the log names no cause of its own, that decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forebay.causes import Cause
from forebay.machine.interface import Machine
from forebay.operation.doctor import Diagnosis as DoctorAnswer
from forebay.operation.doctor import Observations, SourceLog, diagnose, read_file
from forebay.operation.doctor.run_folder import diagnose_run as ask_doctor
from forebay.operation.watch.observation import DeathObservation, OwnerKind
from forebay.runs.run_record import Run
from forebay.servers.base import Role

__all__ = ["DiagnosisSummary", "diagnose_log", "diagnose_run"]

_WANTED_EXITS = (0, -2, -15, 130, 143)
_WEAK = (Cause.UNKNOWN, Cause.ENGINE_BUG)


@dataclass(frozen=True, slots=True)
class DiagnosisSummary:
    """A cause code with its evidence lines and the fix."""

    cause: str
    evidence: tuple[str, ...] = ()
    fix: str | None = None

    def fields(self) -> dict[str, object]:
        """As JSON."""
        return {"cause": self.cause, "cause_evidence": list(self.evidence), "fix": self.fix}


def diagnose_run(run: Run, machine: Machine, seen: DeathObservation) -> DiagnosisSummary:
    """The cause of ``run``'s death, from its log, its exit code, what the machine recorded and what the watch saw."""
    answer = ask_doctor(run, machine)
    evidence = tuple(f"{item.source}:{item.line}: {item.text}" if item.line else item.text for item in answer.evidence)
    return _weighed(DiagnosisSummary(_cause(answer), evidence, answer.fix), seen)


def diagnose_log(log: str | None, server: str, seen: DeathObservation) -> DiagnosisSummary:
    """The cause of a death seen from outside; without a log only what the watch saw."""
    sources: list[SourceLog] = []
    if log is not None:
        try:
            sources = [read_file(Path(log))]
        except OSError:
            sources = []
    exit_code = next((lost.exit_code for lost in seen.lost if lost.role is Role.API_SERVER), None)
    if not sources:
        return _weighed(DiagnosisSummary(Cause.UNKNOWN), seen)
    known = server if server in ("embedded", "sglang", "vllm") else None
    answer = diagnose(sources, Observations(server=known, exit_code=exit_code))
    evidence = tuple(f"{item.source}:{item.line}: {item.text}" if item.line else item.text for item in answer.evidence)
    return _weighed(DiagnosisSummary(_cause(answer), evidence, answer.fix), seen)


def _cause(answer: DoctorAnswer) -> str:
    """The doctor calls an orderly end nothing wrong; for whoever waits for the server it is a death with a reason."""
    if answer.cause is None and "stopped on request" in answer.meaning:
        return Cause.STOPPED_ON_REQUEST
    return answer.cause or Cause.UNKNOWN


def _weighed(told: DiagnosisSummary, seen: DeathObservation) -> DiagnosisSummary:
    """``told``, unless it names no cause and the watch saw one."""
    if told.cause not in _WEAK:
        return told
    own = _from_watch(seen)
    if own is not None:
        return own
    front_first = bool(seen.lost) and seen.lost[0].role is Role.API_SERVER
    if told.cause is Cause.UNKNOWN and front_first and seen.lost[0].exit_code in _WANTED_EXITS:
        # nothing in the log is wrong, and the front left by itself with the exit of a wanted stop
        return DiagnosisSummary(Cause.STOPPED_ON_REQUEST, (*told.evidence, seen.lost[0].describe()), None)
    return told


def _from_watch(seen: DeathObservation) -> DiagnosisSummary | None:
    if seen.owner.kind is OwnerKind.OTHER:
        evidence = (f"pid {seen.owner.pid} ({seen.owner.command[:100]}) listens on the port",)
        return DiagnosisSummary(Cause.PORT_IN_USE, evidence, "end that process, or choose another --port")
    first = seen.lost[0] if seen.lost else None
    if first is None:
        return None
    fix = "look for who killed it: the kernel log says whether memory ran out"
    if first.role is not Role.API_SERVER:
        return DiagnosisSummary(Cause.WORKER_KILLED, (first.describe(),), fix)
    if first.exit_code is not None and first.exit_code == -9:
        return DiagnosisSummary(Cause.FRONT_KILLED, (first.describe(),), fix)
    return None
