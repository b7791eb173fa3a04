"""Processes: who they are (pid, start time and boot id together), whose children, and what they use.

A pid alone is never an identity: it is reused. ``ProcessId`` is, across reboots too, and nothing here signals without
it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from forebay.machine.interface import Machine
from forebay.machine.proc_stat import ProcStat, parse_stat

__all__ = [
    "IoBytes",
    "ProcessId",
    "ProcessInfo",
    "all_processes",
    "boot_id",
    "descendants",
    "environment",
    "identify",
    "io_bytes",
    "is_running",
    "read_process",
    "send_signal",
    "session_members",
    "uptime_s",
]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process for ever: pid, start time (clock ticks since boot), boot id."""

    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One look at a process. ``state`` is the kernel's letter (R, S, D, T stopped, t traced, Z zombie)."""

    pid: int
    start_ticks: int
    name: str
    state: str
    ppid: int
    pgid: int
    sid: int
    cpu_s: float
    threads: int
    rss_bytes: int
    started_s: float
    """Seconds between boot and its start."""
    cmdline: tuple[str, ...]
    """Empty for kernel threads, zombies, and where it may not be read."""

    @property
    def is_zombie(self) -> bool:
        return self.state == "Z"

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def command(self) -> str:
        """For a person: the command line, else the name in brackets."""
        return " ".join(self.cmdline) if self.cmdline else f"[{self.name}]"


@dataclass(frozen=True, slots=True)
class IoBytes:
    """/proc/PID/io: ``read_chars`` counts every read, ``read_storage`` only what came from a disk."""

    read_chars: int
    written_chars: int
    read_storage: int
    written_storage: int


def boot_id(machine: Machine) -> str:
    """This boot of the machine; empty where it cannot be read."""
    try:
        return machine.read("/proc/sys/kernel/random/boot_id").strip()
    except OSError:
        return ""


def uptime_s(machine: Machine) -> float:
    """Seconds since boot."""
    return float(machine.read("/proc/uptime").split()[0])


def read_process(machine: Machine, pid: int, *, cmdline: bool = True) -> ProcessInfo | None:
    """One process now; None where there is none."""
    stat = _stat(machine, pid)
    return None if stat is None else _info(pid, stat, _cmdline(machine, pid) if cmdline else ())


def identify(machine: Machine, pid: int) -> ProcessId | None:
    """The identity of the process that has ``pid`` now; None where there is none."""
    stat = _stat(machine, pid)
    return None if stat is None else ProcessId(pid, stat.start_ticks, boot_id(machine))


def is_running(machine: Machine, who: ProcessId) -> bool:
    """Whether exactly this process still exists and is no zombie."""
    stat = _stat(machine, who.pid)
    return (
        stat is not None
        and stat.start_ticks == who.start_ticks
        and stat.state not in "ZX"
        and boot_id(machine) == who.boot_id
    )


def send_signal(machine: Machine, who: ProcessId, number: int) -> bool:
    """Signal exactly this process; False where it is gone, or the machine has been rebooted. Raises PermissionError."""
    if boot_id(machine) != who.boot_id:
        return False
    return machine.signal(who.pid, number, who.start_ticks)


def all_processes(machine: Machine, *, cmdline: bool = False) -> list[ProcessInfo]:
    """Every process that can be seen. Without ``cmdline`` one small read a process."""
    found = []
    for entry in machine.listdir("/proc"):
        if entry.isdigit():
            info = read_process(machine, int(entry), cmdline=cmdline)
            if info is not None:
                found.append(info)
    return found


def descendants(processes: Iterable[ProcessInfo], pid: int) -> list[ProcessInfo]:
    """Children, grandchildren... of ``pid``, parents first. Orphans have left the tree: see ``session_members``."""
    children: dict[int, list[ProcessInfo]] = {}
    for info in processes:
        children.setdefault(info.ppid, []).append(info)
    found, queue = [], [pid]
    while queue:
        for info in children.get(queue.pop(0), ()):
            found.append(info)
            queue.append(info.pid)
    return found


def session_members(processes: Iterable[ProcessInfo], sid: int) -> list[ProcessInfo]:
    """Every process of session ``sid``, orphans included."""
    return [info for info in processes if info.sid == sid]


def io_bytes(machine: Machine, pid: int) -> IoBytes | None:
    """What a process has read and written; None where it is gone or may not be read."""
    try:
        pairs = dict(line.split(": ") for line in machine.read(f"/proc/{pid}/io").splitlines() if ": " in line)
    except OSError:
        return None
    names = ("rchar", "wchar", "read_bytes", "write_bytes")
    return IoBytes(*(int(pairs.get(name, 0)) for name in names))


def environment(machine: Machine, pid: int) -> dict[str, str] | None:
    """The environment a process was started with; None where it may not be read."""
    try:
        data = machine.read_bytes(f"/proc/{pid}/environ").decode("utf-8", "replace")
    except OSError:
        return None
    pairs = (item.partition("=") for item in data.split("\0") if "=" in item)
    return {name: value for name, _, value in pairs}


def _stat(machine: Machine, pid: int) -> ProcStat | None:
    try:
        return parse_stat(machine.read(f"/proc/{pid}/stat"))
    except (OSError, IndexError, ValueError):
        return None  # it ended while we looked


def _cmdline(machine: Machine, pid: int) -> tuple[str, ...]:
    try:
        data = machine.read_bytes(f"/proc/{pid}/cmdline")
    except OSError:
        return ()
    # a title set by setproctitle overwrites argv and is padded with NULs
    text = data.decode("utf-8", "replace").rstrip("\0")
    return tuple(text.split("\0")) if text else ()


def _info(pid: int, stat: ProcStat, cmdline: tuple[str, ...]) -> ProcessInfo:
    return ProcessInfo(
        pid=pid,
        start_ticks=stat.start_ticks,
        name=stat.name,
        state=stat.state,
        ppid=stat.ppid,
        pgid=stat.pgid,
        sid=stat.sid,
        cpu_s=stat.cpu_ticks / _TICKS_PER_S,
        threads=stat.threads,
        rss_bytes=stat.rss_pages * _PAGE_BYTES,
        started_s=stat.start_ticks / _TICKS_PER_S,
        cmdline=cmdline,
    )
