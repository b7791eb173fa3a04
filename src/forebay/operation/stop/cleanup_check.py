"""Check that nothing of a run is left: processes, port, device memory, host memory, shared memory;
and who holds the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forebay.machine.interface import GpuReading, Machine
from forebay.machine.memory import HostMemory, read_memory
from forebay.machine.ports import listeners
from forebay.machine.processes import ProcessInfo, read_process
from forebay.machine.shm import shm_files
from forebay.runs.run_record import Run, RunRecord
from forebay.sizes import format_binary

__all__ = ["CleanupCheck", "CleanupReport", "check_cleanup"]

_GPU_SLACK_BYTES = 64 << 20
_VLLM_GROUP = re.compile(rb"file:///tmp/vllm_dist_([0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class CleanupCheck:
    """One thing that must be free again. ``fix`` says what to do where it is not."""

    what: str
    ok: bool
    found: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class CleanupReport:
    """All checks."""

    checks: tuple[CleanupCheck, ...]

    @property
    def clean(self) -> bool:
        """Every check passed."""
        return all(check.ok for check in self.checks)

    def lines(self) -> list[str]:
        """One line per check, and its fix below where it failed."""
        out = []
        for check in self.checks:
            out.append(f"{'ok  ' if check.ok else 'LEFT'} {check.what}: {check.found}")
            if not check.ok and check.fix:
                out.append(f"     fix: {check.fix}")
        return out


def check_cleanup(
    machine: Machine, run: Run, record: RunRecord, remaining: list[ProcessInfo], before: HostMemory
) -> CleanupReport:
    """Check everything the run could have left, and unlink shared memory of the run that no process maps any more."""
    return CleanupReport(
        (
            _processes(machine, remaining),
            _port(machine, record),
            *_devices(machine, record),
            _shared_memory(machine, run, record),
            _host(machine, record, before),
        )
    )


def _processes(machine: Machine, remaining: list[ProcessInfo]) -> CleanupCheck:
    if not remaining:
        return CleanupCheck("processes", True, "none is left")
    lines, fix = [], "they do not end on SIGKILL: see their state in /proc/PID/wchan"
    for info in remaining:
        if info.is_zombie:
            parent = read_process(machine, info.ppid)
            name = parent.command[:80] if parent is not None else "gone"
            lines.append(f"pid {info.pid} is a zombie; its parent {info.ppid} ({name}) must reap it")
            fix = f"end or signal the parent (pid {info.ppid}): a zombie goes when its parent waits for it or ends"
        else:
            lines.append(f"pid {info.pid} ({info.command[:80].strip()}) in state {info.state}")
    return CleanupCheck("processes", False, "; ".join(lines), fix)


def _port(machine: Machine, record: RunRecord) -> CleanupCheck:
    held = listeners(machine, record.port)
    if not held:
        return CleanupCheck("port", True, f"{record.port} is closed")
    pids = sorted({pid for item in held for pid in item.pids})
    own = {who.pid for who in record.members} | ({record.api_server.pid} if record.api_server is not None else set())
    names = ", ".join(f"pid {pid} ({_command(machine, pid)})" for pid in pids) or "a process that cannot be seen"
    if own & set(pids):
        return CleanupCheck("port", False, f"{record.port} is still held by {names}")
    return CleanupCheck("port", True, f"{record.port} is held by {names}, which does not belong to this run")


def _devices(machine: Machine, record: RunRecord) -> list[CleanupCheck]:
    baseline = record.baseline.gpu_used_bytes if record.baseline is not None else {}
    checks = []
    for gpu in machine.gpus():
        used, was = gpu.total_bytes - gpu.free_bytes, baseline.get(gpu.uuid)
        if was is None:
            continue
        over = used - was
        ok = over <= _GPU_SLACK_BYTES
        found = f"{format_binary(used)} in use, {format_binary(was)} before the launch"
        what = f"memory of GPU {gpu.index}"
        checks.append(CleanupCheck(what, True, found) if ok else _held(machine, gpu, what, found))
    return checks


def _held(machine: Machine, gpu: GpuReading, what: str, found: str) -> CleanupCheck:
    seen = {pid: held for pid, held in gpu.processes.items() if read_process(machine, pid) is not None}
    hidden = {pid: held for pid, held in gpu.processes.items() if pid not in seen}
    holders = [f"pid {pid} ({_command(machine, pid)}) holds {format_binary(held)}" for pid, held in seen.items()]
    if hidden or not gpu.processes:
        who = ", ".join(str(pid) for pid in hidden) or "none that the driver names"
        holders.append(f"held outside this container (host pids: {who})")
        query = f"nvidia-smi -i {gpu.index} --query-compute-apps=pid,used_memory --format=csv"
        fix = f"on the host: {query}, then end that process"
    else:
        fix = "end the process that holds it, if it is yours"
    return CleanupCheck(what, False, f"{found}; {'; '.join(holders)}", fix)


def _shared_memory(machine: Machine, run: Run, record: RunRecord) -> CleanupCheck:
    """A file is the run's when its processes were seen mapping it, or its log names it.
    Mapped files are never removed.
    """
    group = _log_group(machine, run)
    names = set(record.shm_names)
    files = [
        file for file in shm_files(machine)
        if file.name in names or (group is not None and f"vllm_dist_{group}" in file.name)
    ]  # fmt: skip
    removed, kept = [], []
    for file in files:
        if file.pids:
            kept.append(f"{file.name} ({format_binary(file.allocated_bytes)}) mapped by pid {file.pids[0]}")
            continue
        try:
            machine.remove(file.path)
            removed.append(f"{file.name} ({format_binary(file.allocated_bytes)})")
        except OSError as error:
            kept.append(f"{file.name}: {error}")
    if group is not None:
        _remove_quietly(machine, f"/tmp/vllm_dist_{group}")
    if kept:
        return CleanupCheck(
            "shared memory", False, "; ".join(kept), "end the process that maps it, then run `forebay down` again"
        )
    if removed:
        return CleanupCheck("shared memory", True, f"unlinked what no process maps any more: {', '.join(removed)}")
    return CleanupCheck("shared memory", True, "nothing of the run is left in /dev/shm")


def _log_group(machine: Machine, run: Run) -> str | None:
    """vLLM names its shared files after the hexadecimal name in its log's ``distributed_init_method``."""
    try:
        found = _VLLM_GROUP.findall(machine.read_bytes(str(run.log_path)))
    except OSError:
        return None
    return found[-1].decode() if found else None


def _remove_quietly(machine: Machine, path: str) -> None:
    try:
        machine.remove(path)
    except OSError:
        return


def _host(machine: Machine, record: RunRecord, before: HostMemory) -> CleanupCheck:
    """Reported only, never a failure: on a machine with other work MemAvailable moves for other reasons."""
    now = read_memory(machine).available_bytes
    text = f"{format_binary(now)} available, {format_binary(before.available_bytes)} before the stop"
    if record.baseline is not None:
        text += f", {format_binary(record.baseline.host_available_bytes)} before the launch"
    return CleanupCheck("host memory", True, text)


def _command(machine: Machine, pid: int) -> str:
    info = read_process(machine, pid)
    return info.command[:80].strip() if info is not None else "gone"
