"""Checks before a launch, in well under a second: port, GPUs, leftovers, disk, limits, the model's folder.

A finding refuses or warns. ``servers.install`` finds the server's program and version; the plan checks memory.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from forebay.causes import Cause
from forebay.errors import RefusedError
from forebay.machine.interface import GpuReading, Machine
from forebay.machine.memory import limits, read_memory
from forebay.machine.ports import PortState, port_report
from forebay.machine.processes import all_processes, read_process
from forebay.machine.shm import shm_files
from forebay.paths import home_dir
from forebay.runs.owned_processes import owned_processes
from forebay.runs.run_record import Baseline, Run, all_runs
from forebay.sizes import format_binary, format_size

__all__ = ["Finding", "baseline", "port_findings", "preflight", "refuse_if_needed"]

_LOG_BYTES = 1 << 28
_GPU_HELD_BYTES = 256 << 20
_OPEN_FILES = 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found. ``refuses``: a start would fail because of it."""

    refuses: bool
    text: str
    fix: str | None = None
    code: str | None = None


def preflight(machine: Machine, host: str, port: int, model: str, *, gpus: Iterable[GpuReading]) -> list[Finding]:
    """Every check; refusals first."""
    found = [
        *_model(machine, model),
        *port_findings(machine, host, port),
        *_gpus(machine, gpus),
        *_leftovers(machine),
        *_disk(machine),
        *_limits(machine),
    ]
    return sorted(found, key=lambda finding: not finding.refuses)


def refuse_if_needed(findings: Iterable[Finding]) -> None:
    """Raise the first refusal.

    Raises:
        RefusedError: with its code and fix.
    """
    for finding in findings:
        if finding.refuses:
            raise RefusedError(finding.text, fix=finding.fix, code=finding.code)


def baseline(machine: Machine, gpus: Iterable[GpuReading]) -> Baseline:
    """The state of the machine before the launch."""
    return Baseline(
        host_available_bytes=read_memory(machine).available_bytes,
        gpu_used_bytes={gpu.uuid: gpu.total_bytes - gpu.free_bytes for gpu in gpus},
        shm_names=[file.name for file in shm_files(machine, mappers=False)],
    )


def _model(machine: Machine, model: str) -> list[Finding]:
    """A missing folder; the servers would take its path for a hub id and fail half a minute later."""
    if not model.startswith(("/", ".", "~")):
        return []
    path = Path(model).expanduser()
    try:
        numbers = machine.stat(str(path))
    except OSError:
        return [
            Finding(True, f"model {model}: there is no such file or folder", "check the path", Cause.CHECKPOINT_MISSING)
        ]
    if numbers.is_dir and "config.json" not in machine.listdir(str(path)):
        return [
            Finding(
                True,
                f"model {model}: the folder has no config.json",
                "give the folder that holds it",
                Cause.CHECKPOINT_MISSING,
            )
        ]
    return []


def port_findings(machine: Machine, host: str, port: int) -> list[Finding]:
    """Whether a server can have ``host``:``port``, and who has it; empty when it is free."""
    report = port_report(machine, port, host)
    another = f"give another one with --port, such as {port + 1}"
    if report.state is PortState.LISTENING:
        pids = report.pids
        run = _run_of(machine, pids)
        if run is not None:
            return [
                Finding(
                    True, f"port {port} is held by the run {run.name!r}",
                    f"end it with `forebay down {run.name}`, or {another}",
                    Cause.PORT_IN_USE,
                )
            ]  # fmt: skip
        who = ", ".join(f"pid {pid} ({_command(machine, pid)})" for pid in pids) or "a process that cannot be seen"
        return [Finding(True, f"port {port} is held by {who}", another, Cause.PORT_IN_USE)]
    if report.state is PortState.BOUND:
        text = f"port {port} is bound by a process that does not listen (a vLLM that is still loading does this)"
        return [Finding(True, text, another, Cause.PORT_IN_USE)]
    if report.state in (PortState.DENIED, PortState.NO_SUCH_ADDRESS):
        return [
            Finding(
                True, f"{host}:{port} cannot be bound: {report.state}", "check --host and --port", Cause.BIND_FAILED
            )
        ]
    if _port_is_locked(port):
        return [
            Finding(
                True,
                f"another run is starting on port {port}",
                f"see `forebay status`, or {another}",
                Cause.PORT_IN_USE,
            )
        ]
    return []


def _port_is_locked(port: int) -> bool:
    try:
        with (home_dir() / "locks" / f"port-{port}").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _run_of(machine: Machine, pids: Iterable[int]) -> Run | None:
    wanted = set(pids)
    for run in all_runs():
        record = run.read()
        if any(info.pid in wanted for info in owned_processes(machine, record)):
            return run
    return None


def _gpus(machine: Machine, gpus: Iterable[GpuReading]) -> list[Finding]:
    found = []
    for gpu in gpus:
        if gpu.problem is not None:
            found.append(
                Finding(
                    True, f"GPU {gpu.index} cannot be read: {gpu.problem}", "leave it out, or reset it", Cause.GPU_BUSY
                )
            )
            continue
        held = gpu.total_bytes - gpu.free_bytes
        if held < _GPU_HELD_BYTES:
            continue
        holders = [f"pid {pid} ({_command(machine, pid)}) {format_binary(size)}" for pid, size in gpu.processes.items()]
        who = "; ".join(holders) or "processes outside this container"
        text = f"GPU {gpu.index}: {format_binary(held)} of {format_binary(gpu.total_bytes)} are held by others: {who}"
        found.append(Finding(False, text, "end them first, or plan with what is free", Cause.GPU_BUSY))
    return found


def _leftovers(machine: Machine) -> list[Finding]:
    """What earlier runs left: living processes, zombies, and shared memory that no process maps."""
    found: list[Finding] = []
    remembered: dict[str, str] = {}
    for run in all_runs():
        record = run.read()
        remembered.update(dict.fromkeys(record.shm_names, run.name))
        if record.ended:
            left = owned_processes(machine, record)
            if left:
                text = f"the run {run.name!r} is {record.state}, but {len(left)} of its processes are still there"
                found.append(Finding(False, text, f"forebay down {run.name}", Cause.LEFTOVER_SCHEDULER))
    zombies = [info for info in all_processes(machine) if info.is_zombie and _is_server_name(info.name)]
    for info in zombies:
        parent = read_process(machine, info.ppid)
        whose = f"{info.ppid} ({parent.command[:60]})" if parent is not None else str(info.ppid)
        found.append(Finding(False, f"pid {info.pid} ({info.name}) is a zombie: its parent {whose} must reap it"))
    names = [file for file in shm_files(machine) if file.name in remembered and not file.pids]
    for file in names:
        size, owner = format_binary(file.allocated_bytes), remembered[file.name]
        text = f"/dev/shm/{file.name} ({size}) is left over from the run {owner!r}"
        found.append(Finding(False, text, f"forebay down {remembered[file.name]}"))
    return found


def _is_server_name(name: str) -> bool:
    return name.startswith(("sglang", "VLLM", "forebay"))


def _disk(machine: Machine) -> list[Finding]:
    folder = home_dir()
    while not folder.exists():
        folder = folder.parent
    free = machine.space(str(folder)).free_bytes
    if free >= _LOG_BYTES:
        return []
    return [
        Finding(free < 1 << 20, f"{folder} has {format_size(free)} free for logs", "set FOREBAY_HOME to a larger disk")
    ]


def _limits(machine: Machine) -> list[Finding]:
    files = limits(machine).get("Max open files")
    if files is None or files >= _OPEN_FILES:
        return []
    return [
        Finding(False, f"at most {files} open files are allowed: a busy server runs out", f"ulimit -n {_OPEN_FILES}")
    ]


def _command(machine: Machine, pid: int) -> str:
    info = read_process(machine, pid)
    return info.command[:80].strip() if info is not None else f"not visible here, uid {os.getuid()}"
