"""The memory of a machine: what is available (``forebay.hostmemory`` has the formula), swap, /dev/shm, limits,
NUMA nodes, and what its control groups have recorded about trouble.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forebay.hostmemory.available import AvailableMemory, read_available_memory, read_meminfo
from forebay.hostmemory.cgroups import Cgroup, cgroup_folders
from forebay.hostmemory.shm import SHM_FOLDER
from forebay.machine.interface import Machine

__all__ = ["HostMemory", "MemoryEvents", "NumaNode", "ShmSpace", "limits", "memory_events", "read_memory"]


@dataclass(frozen=True, slots=True)
class ShmSpace:
    """/dev/shm: a memory file system with a size of its own (64 MB by default in containers)."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node's memory."""

    index: int
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class HostMemory:
    """A machine's memory now. ``memlock_bytes`` None: no limit on locked (pinned) memory."""

    total_bytes: int
    mem_available_bytes: int
    swap_total_bytes: int
    swap_free_bytes: int
    cgroup: Cgroup | None
    shm: ShmSpace | None
    memlock_bytes: int | None
    numa_nodes: tuple[NumaNode, ...]

    @property
    def available_bytes(self) -> int:
        """What a new process can have: MemAvailable, or less where the control group allows less."""
        return AvailableMemory(self.mem_available_bytes, self.cgroup).available_bytes


@dataclass(frozen=True, slots=True)
class MemoryEvents:
    """A control group's own record of trouble (cgroup v2 ``memory.events``, v1 ``memory.oom_control``)."""

    path: str
    oom: int
    oom_kill: int
    high: int
    max: int


def read_memory(machine: Machine) -> HostMemory:
    """Read the machine's memory. Raises OSError where there is no /proc/meminfo."""
    info = read_meminfo(machine.read)
    available = read_available_memory(machine.read)
    return HostMemory(
        total_bytes=info["MemTotal"],
        mem_available_bytes=available.mem_available_bytes,
        swap_total_bytes=info.get("SwapTotal", 0),
        swap_free_bytes=info.get("SwapFree", 0),
        cgroup=available.cgroup,
        shm=_shm(machine),
        memlock_bytes=limits(machine).get("Max locked memory"),
        numa_nodes=_numa(machine),
    )


def limits(machine: Machine, pid: int | None = None) -> dict[str, int | None]:
    """Soft limits of a process (/proc/PID/limits) by the kernel's names; None: unlimited. Empty where not readable."""
    try:
        text = machine.read(f"/proc/{pid if pid is not None else 'self'}/limits")
    except OSError:
        return {}
    found: dict[str, int | None] = {}
    for line in text.splitlines()[1:]:
        match = re.match(r"(Max [a-z ]+?)\s{2,}(\S+)", line)
        if match:
            found[match[1]] = None if match[2] == "unlimited" else int(match[2])
    return found


def memory_events(machine: Machine, pid: int | None = None) -> list[MemoryEvents]:
    """The counters of a process's control group and of each one above it, innermost first."""
    found = []
    for version, folder in cgroup_folders(machine.read, pid):
        name = "memory.events" if version == 2 else "memory.oom_control"
        try:
            pairs = dict(line.split() for line in machine.read(f"{folder}/{name}").splitlines())
        except (OSError, ValueError):
            continue
        counts = {key: int(value) for key, value in pairs.items()}
        found.append(
            MemoryEvents(
                folder, counts.get("oom", 0), counts.get("oom_kill", 0), counts.get("high", 0), counts.get("max", 0)
            )
        )
    return found


def _shm(machine: Machine) -> ShmSpace | None:
    try:
        space = machine.space(SHM_FOLDER)
    except OSError:
        return None
    return ShmSpace(space.total_bytes, space.free_bytes)


def _numa(machine: Machine) -> tuple[NumaNode, ...]:
    base = "/sys/devices/system/node"
    try:
        names = [name for name in machine.listdir(base) if re.fullmatch(r"node\d+", name)]
    except OSError:
        return ()
    nodes = []
    for name in sorted(names, key=lambda text: int(text[4:])):
        try:
            text = machine.read(f"{base}/{name}/meminfo")
        except OSError:
            continue
        info = {key: int(value) * 1024 for key, value in re.findall(r"(MemTotal|MemFree):\s+(\d+)", text)}
        nodes.append(NumaNode(int(name[4:]), info.get("MemTotal", 0), info.get("MemFree", 0)))
    return tuple(nodes)
