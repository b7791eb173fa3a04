"""From what the user names (files, a folder, a run) to the logs and the machine's records of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from forebay.errors import UsageError
from forebay.machine.interface import Machine
from forebay.machine.kernel_log import read_kernel_log
from forebay.machine.memory import memory_events
from forebay.machine.processes import is_running, read_process, uptime_s
from forebay.operation.doctor.diagnose import diagnose
from forebay.operation.doctor.facts import HostFacts
from forebay.operation.doctor.launch_sizing import Sizer
from forebay.operation.doctor.read_log import SourceLog, read_file, read_stream
from forebay.operation.doctor.records import Diagnosis, Observations
from forebay.runs.run_record import Run, RunRecord, all_runs, find_run

__all__ = ["diagnose_named", "diagnose_run", "observe"]


def diagnose_named(
    machine: Machine,
    names: Sequence[str],
    observed: Observations | None = None,
    facts: HostFacts | None = None,
    sizer: Sizer | None = None,
) -> Diagnosis:
    """Answer for what the user named: one run or run folder, or one or more log files.

    Args:
        machine: where the run was, for its kernel log and process states.
        names: paths of logs (ranks or processes of one server), ``-`` for the standard input, a folder of a run, or a
            run's name.
        observed: what the user knows of the exit; added to nothing else for files.
        facts: what the user knows of the machine that the log is from.
        sizer: the planner, for the values that fit this launch.

    Raises:
        UsageError: something named is neither a file nor a run.
    """
    if len(names) == 1:
        run = _run_of(names[0])
        if run is not None:
            return diagnose_run(run, machine)
    logs: list[SourceLog] = []
    for name in names:
        logs.extend(_logs_of(name))
    return diagnose(logs, observed, facts, sizer)


def diagnose_run(run: Run, machine: Machine) -> Diagnosis:
    """Answer for a run on record: its log, its exit code, and what the machine recorded meanwhile.

    Raises:
        UsageError: the record cannot be read.
    """
    record = run.read()
    logs = [read_file(run.log_path, name="server.log")] if run.log_path.is_file() else [SourceLog("server.log")]
    return diagnose(logs, observe(machine, record))


def observe(machine: Machine, record: RunRecord, *, oom_kills: int | None = None) -> Observations:
    """What the machine says of a run. What cannot be read is left out.

    Args:
        machine: where it ran.
        record: the run.
        oom_kills: kills by the run's memory controller since it began, where somebody counted before and after.
    """
    members = [who for who in (record.api_server, *record.members) if who is not None]
    states = {}
    for who in members:
        if is_running(machine, who):
            info = read_process(machine, who.pid, cmdline=False)
            if info is not None:
                states[who.pid] = info.state
    lines, readable = _kernel_lines(machine, record)
    return Observations(
        server=record.server if record.server in ("embedded", "sglang", "vllm") else None,
        exit_code=record.exit_code,
        kernel_lines=lines,
        kernel_readable=readable,
        oom_kills=oom_kills if oom_kills is not None else _no_kills_at_all(machine),
        states=states,
        names={int(pid): name for pid, name in record.member_names.items() if pid.isdigit()},
        pids=tuple(dict.fromkeys(who.pid for who in members)),
        stop_requested=record.stop_requested_at is not None,
    )


def _no_kills_at_all(machine: Machine) -> int | None:
    """0 where the control groups count no kill since they were made: then none was of this run. Else not known."""
    events = memory_events(machine)
    return 0 if events and all(event.oom_kill == 0 for event in events) else None


def _kernel_lines(machine: Machine, record: RunRecord) -> tuple[tuple[str, ...], bool]:
    """The kernel's lines since the run began, and whether they could be read; not after a reboot,
    whose log is another one.
    """
    try:
        since = uptime_s(machine) - (machine.now() - record.created_at)
    except OSError:
        return (), False
    if since < 0:
        return (), False
    log = read_kernel_log(machine, since_s=since)
    return tuple(line.text for line in log.lines), log.unreadable is None


def _run_of(name: str) -> Run | None:
    path = Path(name)
    if path.is_dir() and (path / "run.json").is_file():
        return Run(path)
    if path.exists() or "/" in name:
        return None
    return find_run(name)


def _logs_of(name: str) -> list[SourceLog]:
    if name == "-":
        return [read_stream(sys.stdin.buffer, "standard input")]
    path = Path(name)
    if path.is_dir():
        files = [file for end in ("*.log", "*.log.gz", "*.log.zst") for file in sorted(path.glob(end))]
        if not files:
            raise UsageError(f"doctor: {name} is a folder without *.log files", fix="name the log files")
        return [read_file(file) for file in files]
    if not path.exists():
        run = _run_of(name)
        if run is not None:
            raise UsageError(
                f"doctor: {name} is a run, and stands among files", fix=f"ask for it alone: forebay doctor {name}"
            )
        known = ", ".join(sorted(other.name for other in all_runs())) or "none"
        raise UsageError(
            f"doctor: {name}: no such file, and no run of that name (runs: {known})", fix="see `forebay status`"
        )
    return [read_file(path)]
