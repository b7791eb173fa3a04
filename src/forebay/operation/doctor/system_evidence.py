"""What the machine's own records add: the kernel's kills, exit codes, process states.
Pure functions over ``Observations``.
"""

from __future__ import annotations

import re
import signal

from forebay.causes import Cause
from forebay.operation.doctor.candidate import Candidate
from forebay.operation.doctor.lifecycle import Lifecycle, StartOutcome
from forebay.operation.doctor.records import Evidence, Observations
from forebay.operation.doctor.rule import Priority
from forebay.operation.doctor.transcript import Transcript

__all__ = ["oom_line", "system_candidates"]

_OOM_KILL = re.compile(
    r"(?:Out of memory|Memory cgroup out of memory): Kill(?:ed)? process (?P<pid>\d+) \((?P<name>[^)]*)\)",
    re.IGNORECASE,
)
_OOM_OTHER = re.compile(r"oom-kill:.*\bpid=(?P<pid>\d+)|oom_reaper: reaped process (?P<pid2>\d+)")
_SERVER_NAMES = re.compile(r"python|sglang|vllm|VLLM|forebay|scheduler|EngineCore|Worker", re.IGNORECASE)


def oom_line(observed: Observations) -> str | None:
    """The kernel's record of killing one of the run's processes;
    of any server process where the run's pids are not known.
    """
    for text in observed.kernel_lines:
        match = _OOM_KILL.search(text)
        if match and (
            int(match["pid"]) in observed.pids or (not observed.pids and _SERVER_NAMES.search(match["name"]))
        ):
            return text
        other = _OOM_OTHER.search(text)
        if other and int(other["pid"] or other["pid2"]) in observed.pids:
            return text
    return None


def system_candidates(transcript: Transcript, life: Lifecycle) -> list[Candidate]:
    """Causes that the machine's records say; a specific cause in the log still comes first where the log names one."""
    observed = transcript.observed
    result = [*_oom(observed, life), *_states(observed)]
    if life.outcome is not StartOutcome.STOPPED:
        result += _exit(transcript, life)
    return result


def _oom(observed: Observations, life: Lifecycle) -> list[Candidate]:
    text = oom_line(observed)
    if text is None and not observed.oom_kills:
        return []
    evidence = [Evidence("kernel log", None, text)] if text else []
    if observed.oom_kills:
        evidence.append(Evidence("memory.events", None, f"oom_kill {observed.oom_kills}"))
    size = re.search(r"anon-rss:(\d+)kB", text or "")
    held = f" It held {int(size[1]) / 2**20:.1f} GiB." if size else ""
    return [
        Candidate(
            Cause.HOST_OOM_KILLED,
            Priority.GENERAL,
            (-1.0,),
            "The kernel killed a process of this server for want of memory." + held,
            "raise the memory limit, or ask for smaller host pools (sizes are per rank); `forebay plan` computes what "
            "fits",
            tuple(evidence),
        )
    ]


def _states(observed: Observations) -> list[Candidate]:
    result = []
    stopped = [pid for pid, state in observed.states.items() if state in ("T", "t")]
    if stopped:
        pid = stopped[0]
        result.append(
            Candidate(
                Cause.ENGINE_HUNG,
                Priority.SPECIFIC,
                (0.0,),
                f"{_who(observed, pid)} is stopped (state T): it will answer nothing until it is continued.",
                f"kill -CONT {pid} lets it go on; find out who stopped it",
                (Evidence(f"/proc/{pid}/stat", None, f"state {observed.states[pid]}"),),
            )
        )
    zombies = [pid for pid, state in observed.states.items() if state == "Z" and pid not in observed.pids[:1]]
    if zombies and observed.exit_code is None:
        pid = zombies[0]
        result.append(
            Candidate(
                Cause.WORKER_KILLED,
                Priority.SECONDARY,
                (0.0,),
                f"{_who(observed, pid)} is dead (a zombie) while the front still runs.",
                "end the run (`forebay down`) and start again; look for who killed it in the kernel log",
                (Evidence(f"/proc/{pid}/stat", None, "state Z"),),
            )
        )
    return result


def _who(observed: Observations, pid: int) -> str:
    name = observed.names.get(pid, "A process")
    return f"{name} (pid {pid})"


def _exit(transcript: Transcript, life: Lifecycle) -> list[Candidate]:
    number = transcript.observed.signal
    if number is None:
        return []
    evidence = (Evidence("exit code", None, f"{transcript.observed.exit_code} ({_signal_name(number)})"),)
    if number in (signal.SIGTERM, signal.SIGINT) and life.outcome is StartOutcome.OPEN:
        return [] if life.came_up else [_stopped(evidence)]
    if number == signal.SIGKILL:
        return [
            Candidate(
                Cause.FRONT_KILLED,
                Priority.SECONDARY,
                (1e12,),
                "The front process was killed by SIGKILL, from outside: it wrote no last word.",
                "`dmesg -T | grep -i -e oom -e killed` tells whether the kernel did; `forebay down` ends what it left "
                "behind "
                "(its engine may live on and hold memory)",
                evidence,
            )
        ]
    if number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
        cause = Cause.SHM_FULL if number == signal.SIGBUS else Cause.ENGINE_BUG
        return [
            Candidate(
                cause,
                Priority.SECONDARY,
                (1e12,),
                f"The process crashed ({_signal_name(number)}).",
                "see the cause's page",
                evidence,
            )
        ]
    return []


def _stopped(evidence: tuple[Evidence, ...]) -> Candidate:
    return Candidate(
        Cause.STOPPED_ON_REQUEST,
        Priority.SECONDARY,
        (1e12,),
        "A signal asked it to stop before it was ready.",
        "nothing is broken: start it again",
        evidence,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
